"""The example connector with one thing wrong: what the bench has to see."""

from __future__ import annotations

import threading
from typing import Any

from example_connector import ExampleConnector


class StrayWriter(ExampleConnector):
    """Writes a block that belongs to nobody's load."""

    def wait_for_save(self) -> None:
        super().wait_for_save()
        self.caches[0][1].fill_(7)


class WrongBytes(ExampleConnector):
    """Loads the first saved block under every name."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for _, block in self._get_connector_metadata().loads:
            for cache, piece in zip(self.caches, next(iter(self.store.values())), strict=True):
                cache[block].copy_(piece)


class LoadsNothing(ExampleConnector):
    """Promises, and copies nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._get_connector_metadata()


class Raises(ExampleConnector):
    """Raises in a worker hook once there is something to save."""

    def wait_for_save(self) -> None:
        if self._get_connector_metadata().saves:
            raise IndexError("list index out of range")


class PromisesAll(ExampleConnector):
    """Promises the last token too."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        tokens, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (request.num_tokens - num_computed_tokens if tokens else 0), asynchronous


class NeverSure(ExampleConnector):
    """Answers "not yet" for ever."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return None, False


class Holds(ExampleConnector):
    """Takes a reference on a block of every request that ends, and never gives it back."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        if block_ids and not hasattr(self, "held"):
            self.held = [self.pool.blocks[block_ids[0]]]
            self.pool.touch(self.held)
        return False, None


class LosesThread(ExampleConnector):
    """A thread of its own ends with an exception at the first save."""

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self._get_connector_metadata().saves:
            thread = threading.Thread(target=lambda: [][1], name="saver")
            thread.start()
            thread.join()


class NeverDone(ExampleConnector):
    """Promises asynchronous loads that it never reports."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return tokens, tokens > 0


class OldWeights(ExampleConnector):
    """Forgets a reset."""

    def reset_cache(self) -> bool:
        return True
