"""A small KV connector that is right: every worker keeps each full block in a dictionary."""

# An example to be read; the base class says what the types are.
# ruff: noqa: ANN001, ANN003, ANN201, ANN202, ANN204, B905

from collections import Counter

from vllm.distributed.kv_transfer.kv_connector.v1 import base


class Plan(base.KVConnectorMetadata):
    def __init__(self):
        self.loads, self.saves = [], []  # pairs: epoch and hash of a block, its number


class Saved(base.KVConnectorWorkerMetadata):
    def __init__(self, keys):
        self.ranks = Counter(keys)  # how many ranks have a block

    def aggregate(self, other):
        return Saved(self.ranks + other.ranks)


class ExampleConnector(base.KVConnectorBase_V1):
    requires_kv_delivery = False  # a cache: what is not saved is owed to nobody

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.block = vllm_config.cache_config.block_size
        self.world_size = vllm_config.parallel_config.world_size
        self.saved, self.plan, self.epoch = Counter(), Plan(), 0
        self.local, self.requests, self.store = {}, {}, {}

    def _keys(self, request, first, stop):
        return [(self.epoch, name) for name in request.block_hashes[first:stop]]

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        first = self.local[request.request_id] = num_computed_tokens // self.block
        last = 0 if request.skip_reading_prefix_cache else (request.num_tokens - 1) // self.block
        is_there = [self.saved[key] == self.world_size for key in self._keys(request, first, last)]
        return [*is_there, False].index(False) * self.block, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        first = self.local.pop(request.request_id, 0)
        stop = first + num_external_tokens // self.block
        self.plan.loads += zip(self._keys(request, first, stop), blocks.get_block_ids()[0][first:])
        self.requests[request.request_id] = request

    def build_connector_meta(self, output):
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.requests[name]
            (table,) = output.kv_connector_block_state.get_block_ids(name)  # this step's, whole
            settled = min(request.num_computed_tokens + tokens, request.num_tokens)  # no drafts
            first, stop = request.num_computed_tokens // self.block, settled // self.block
            self.plan.saves += zip(self._keys(request, first, stop), table[first:stop])
        for name in output.finished_req_ids - output.num_scheduled_tokens.keys():
            self.requests.pop(name, None)
        plan, self.plan = self.plan, Plan()
        return plan

    def update_connector_output(self, output):
        self.saved |= getattr(output.kv_connector_worker_meta, "ranks", Counter())

    def reset_cache(self):
        self.epoch += 1
        return True

    def register_kv_caches(self, kv_caches):
        self.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context, **kwargs):
        for key, block in self._get_connector_metadata().loads:
            for cache, piece in zip(self.caches, self.store[key]):
                cache[block].copy_(piece)

    def wait_for_save(self):
        for key, block in self._get_connector_metadata().saves:
            self.store[key] = [cache[block].clone() for cache in self.caches]

    def build_connector_worker_meta(self):
        return Saved(key for key, _ in self._get_connector_metadata().saves)

    def wait_for_layer_load(self, layer_name): ...
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
