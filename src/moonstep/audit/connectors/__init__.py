"""Connectors: what the audit knows about particular ones, by class name.

Nothing here is needed to drive a connector. A *kit* can say under which settings it is best
audited, open its books to the bench, and surround it with what it needs to start at all.
"""

from __future__ import annotations

import importlib
import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from moonstep.audit.engineconfig import ConnectorChoice
    from moonstep.audit.inspector import Inspector
    from moonstep.audit.shape import Shape

_MODULES = {
    "MoonstepConnector": "moonstep.audit.connectors.moonstep",
    "MooncakeStoreConnector": "moonstep.audit.connectors.mooncake",
}
_WITH_REAL_STORE = {"MooncakeStoreConnector": "moonstep.audit.connectors.mooncake_real"}


class StoreControl(Protocol):
    """A store under a connector that fails on command.

    `struck` counts calls that came while they were to go wrong.
    """

    struck: int

    def inject(self, kind: str, verbs: Sequence[str]) -> bool:
        """Go wrong in a way of `history.FAULTS`, for these of put, get and contains, until told
        otherwise; False, and nothing happens, for a way it does not know."""

    def clear(self) -> None:
        """Be well again; calls that hang go on."""


@dataclass(frozen=True, slots=True)
class Kit:
    """What is known about one connector.

    `settings(shape, rng)` are used for random histories when the user names none, and are tight;
    `variants` are named sets of settings for scenarios, which want to find what they stored.
    `adapt(scheduler_half)` is called once it is built, for what no setting can say.
    `surroundings()` is entered once around everything, `fresh()` called before each engine and
    `retire(halves)` after its shutdown. `store(scheduler_half)` is the store under it; with
    `in_its_own_time` there is one that cannot be told to fail. `in_role` makes settings fit a role.
    Threads named in `passing_threads` may end at any time; `note` is printed with a report.
    An exception of `refusals` at construction is no finding: the connector cannot do what is asked.
    """

    settings: Callable[[Shape, random.Random], dict[str, Any]] | None = None
    variants: Mapping[str, Callable[[Shape], dict[str, Any]]] = field(default_factory=dict)
    adapt: Callable[[Any], None] = lambda scheduler_half: None
    inspect: Callable[[Any, Sequence[Any]], Inspector] | None = None
    surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext
    fresh: Callable[[], None] = lambda: None
    retire: Callable[[Sequence[Any]], None] = lambda halves: None
    passing_threads: tuple[str, ...] = ()
    refusals: tuple[type[Exception], ...] = ()
    store: Callable[[Any], StoreControl | None] | None = None
    in_its_own_time: bool = False
    in_role: Callable[[str, Shape, dict[str, Any]], dict[str, Any]] = lambda role, shape, own: own
    note: str = ""


_KITS: dict[str, Kit] = {}


def register(class_name: str, kit: Kit) -> None:
    """Make a kit known for connectors of this class name."""
    _KITS[class_name] = kit


def use_real_store(name: str | None) -> None:
    """From now on, drive a connector of this name over the real store instead of a stand-in.

    For this process. Raises ``ValueError`` for a connector that no real store is known for, and
    where its package is not installed.
    """
    class_name = (name or "").rpartition(":")[2]
    if class_name not in _WITH_REAL_STORE:
        known = ", ".join(_WITH_REAL_STORE)
        raise ValueError(f"no real store is known for {class_name}, only for {known}")
    module = importlib.import_module(_WITH_REAL_STORE[class_name])
    module.check()
    register(class_name, module.KIT)


def kit_for(name: str | None) -> Kit:
    """The kit of a connector named as on the command line; an empty one for a stranger."""
    class_name = (name or "").rpartition(":")[2]
    if class_name not in _KITS and class_name in _MODULES:
        register(class_name, importlib.import_module(_MODULES[class_name]).KIT)
    return _KITS.get(class_name, Kit())


def fitted(connector: ConnectorChoice, shape: Shape, seed: int) -> ConnectorChoice:
    """The connector with settings that fit the shape, unless the user gave some."""
    kit = kit_for(connector.name)
    if kit.settings is None or connector.extra_config:
        return connector
    facts = kit.settings(shape, random.Random(seed))
    return replace(connector, extra_config=kit.in_role(connector.role, shape, facts))


def variants_of(connector: ConnectorChoice) -> tuple[str, ...]:
    """Names of the sets of settings under which scenarios are played; one of them may be ""."""
    return ("",) if connector.extra_config else tuple(kit_for(connector.name).variants) or ("",)


def varied(connector: ConnectorChoice, shape: Shape, variant: str) -> ConnectorChoice:
    """The connector with the settings of a variant; as it is for the variant ""."""
    if not variant:
        return connector
    kit = kit_for(connector.name)
    facts = kit.variants[variant](shape)
    return replace(connector, extra_config=kit.in_role(connector.role, shape, facts))


def store_of(scheduler_half: Any) -> StoreControl | None:
    """The store under this connector, if there is one that can be told to fail."""
    kit = kit_for(type(scheduler_half).__name__)
    return None if kit.store is None else kit.store(scheduler_half)


def inspect(scheduler_half: Any, worker_halves: Sequence[Any]) -> Inspector | None:
    """The inspector for a connector, or None where nobody registered one."""
    kit = kit_for(type(scheduler_half).__name__)
    return None if kit.inspect is None else kit.inspect(scheduler_half, worker_halves)
