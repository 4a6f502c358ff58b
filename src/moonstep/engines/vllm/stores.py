"""The store tier of a vLLM engine: lookups in the scheduler process, jobs in the workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moonstep.config import SettingError, Settings
from moonstep.engines.vllm.facts import EngineFacts
from moonstep.engines.vllm.keyring import VllmKeyring
from moonstep.keys import checked_namespace
from moonstep.scheduler.index import HostIndex
from moonstep.scheduler.pace import PrefillPace
from moonstep.scheduler.tier import StoreTier
from moonstep.stores.asking import LookupThread, NoLooks
from moonstep.stores.base import Store, StoreUnwell
from moonstep.stores.checked import CheckedStore
from moonstep.stores.measured import MeasuredStore
from moonstep.stores.urls import StoreUrl, Use, open_store, resolve

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


class SchedulerStore:
    """What the scheduler process needs for a store: keys, a thread that looks, the tier."""

    tier: StoreTier
    """Once it has been made."""

    def __init__(
        self,
        settings: Settings,
        facts: EngineFacts,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._keyring = VllmKeyring(settings, config, kv_cache_config)
        self._lookup: LookupThread | NoLooks = NoLooks()
        self._looked_into: MeasuredStore | None = None
        if settings.fetches:
            self._looked_into = MeasuredStore(_open(settings, Use.LOOK_UP))
            self._lookup = LookupThread(self._looked_into)
            self._lookup.start()

    @property
    def failed_looks(self) -> int:
        """Looks that the store was too unwell to answer."""
        return self._looked_into.stats_of("contains").unwell if self._looked_into else 0

    def make_tier(self, index: HostIndex) -> StoreTier:
        """The tier over ``index``. Once."""
        facts = self._facts
        self.tier = StoreTier(
            self._settings,
            facts.groups,
            facts.world_size,
            index,
            self._keyring,
            self._lookup,
            prefill=PrefillPace(facts.tokens_per_decode, lag=int(facts.async_scheduling)),
        )
        return self.tier

    def close(self) -> None:
        """End the lookups, waiting no longer than a shutdown may."""
        if not self._lookup.close(self._settings.shutdown_deadline_s):
            logger.warning("moonstep: a look into the store hangs and is left behind")


def worker_store(settings: Settings) -> Store | None:
    """A worker's own store, checked; ``None`` when none is set.

    Raises:
        SettingError: when it cannot be opened.
    """
    return CheckedStore(_open(settings, Use.SERVE)) if settings.store else None


def check_settings(extra: Mapping[str, Any] | None) -> None:
    """Check what can be checked before there is an engine; a directory is opened and closed.

    Raises:
        SettingError: for the first thing that would be refused later.
    """
    settings = Settings.parse(extra or {})
    if settings.store:
        checked_namespace(settings.namespace)
        resolve(settings.store)
        if StoreUrl.parse(settings.store).scheme == "dir":
            _open(settings, Use.SERVE).close()


def _open(settings: Settings, use: Use) -> Store:
    if settings.store is None:
        raise SettingError("store", None, "name a store")
    try:
        return open_store(settings.store, use)
    except StoreUnwell as error:
        raise SettingError("store", settings.store, f"it does not open: {error}") from error
