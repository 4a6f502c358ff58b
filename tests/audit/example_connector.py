"""A small KV connector that is right: every worker keeps each full block in a dictionary."""

# An example to be read; the base class says what the types are.
# ruff: noqa: ANN001, ANN003, ANN201, ANN204

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1 import base


@dataclass
class Plan(base.KVConnectorMetadata):
    epoch: int
    loads: list[tuple[bytes, int]] = field(default_factory=list)  # block hash, block
    saves: list[tuple[bytes, int]] = field(default_factory=list)


@dataclass
class Saved(base.KVConnectorWorkerMetadata):
    by_ranks: Counter[tuple[int, bytes]]  # epoch and block hash: how many ranks have it

    def aggregate(self, other: "Saved") -> "Saved":
        return Saved(self.by_ranks + other.by_ranks)


class ExampleConnector(base.KVConnectorBase_V1):
    requires_kv_delivery = False  # a cache: what is not saved is owed to nobody

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.block = vllm_config.cache_config.block_size
        self.ranks = vllm_config.parallel_config.world_size
        self.saved, self.plan = Counter(), Plan(epoch=0)
        self.hits, self.admitted, self.lives = {}, {}, {}
        self.store, self.caches = {}, []

    # Scheduler half

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        first, stop = num_computed_tokens // self.block, (request.num_tokens - 1) // self.block
        names = [] if request.skip_reading_prefix_cache else request.block_hashes[first:stop]
        self.hits[request.request_id] = first
        run = 0
        while run < len(names) and self.saved[self.plan.epoch, names[run]] == self.ranks:
            run += 1
        return run * self.block, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        (table,) = blocks.get_block_ids()
        first = self.hits.pop(request.request_id, request.num_computed_tokens // self.block)
        stop = first + num_external_tokens // self.block
        self.plan.loads += zip(request.block_hashes[first:stop], table[first:stop], strict=True)
        self.admitted[request.request_id] = [request, list(table), stop]

    def build_connector_meta(self, output):
        for name in [*output.preempted_req_ids, *output.finished_req_ids]:
            self.lives.pop(name, None)  # lives end before this step's begin
        self.lives |= {n: a for n, a in self.admitted.items() if n in output.num_scheduled_tokens}
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks and name not in self.admitted:
                self.lives[name][1].extend(blocks[0])
        for name, tokens in output.num_scheduled_tokens.items():
            request, table, first = self.lives[name]
            settled = min(request.num_computed_tokens + tokens, request.num_tokens)
            stop = min(settled // self.block, len(request.block_hashes))
            names = request.block_hashes[first:stop]
            self.plan.saves += zip(names, table[first:stop], strict=False)
            self.lives[name][2] = max(first, stop)
        plan, self.plan, self.admitted = self.plan, Plan(self.plan.epoch), {}
        return plan

    def update_connector_output(self, output):
        if output.kv_connector_worker_meta is not None:
            self.saved |= output.kv_connector_worker_meta.by_ranks

    def reset_cache(self):
        self.plan.epoch += 1
        return True

    # Worker half

    def register_kv_caches(self, kv_caches):
        self.caches = list(kv_caches.values())

    def start_load_kv(self, forward_context, **kwargs):
        for name, block in self._get_connector_metadata().loads:
            for cache, piece in zip(self.caches, self.store[name], strict=True):
                cache[block].copy_(piece)

    def wait_for_save(self):
        for name, block in self._get_connector_metadata().saves:
            self.store[name] = [cache[block].clone() for cache in self.caches]

    def build_connector_worker_meta(self):
        plan = self._get_connector_metadata()
        return Saved(Counter((plan.epoch, name) for name, _ in plan.saves)) if plan.saves else None

    def wait_for_layer_load(self, layer_name): ...
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
