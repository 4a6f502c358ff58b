"""Keys: one fact changed, other keys; nothing changed, the same keys in any process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonstep.config import SettingError
from moonstep.keys import (
    SAMPLE_BYTES,
    SAMPLES_PER_SHARD,
    Epoch,
    Facts,
    GroupFacts,
    KeyMaker,
    canonical,
    checked_namespace,
    fingerprint,
    key_maker,
    sample_starts,
    weights_identity,
)
from moonstep.stores.directory.tree import Tree

GROUP = GroupFacts(
    index=0,
    kind="full attention",
    block_tokens=16,
    object_tokens=256,
    layer_names=("layers.0", "layers.1"),
    spec="FullAttentionSpec(heads=3, head_size=64)",
)
FACTS = Facts(
    model="LlamaForCausalLM {'rope_theta': 100000}",
    revision="main",
    epoch="weights:0011",
    model_dtype="bfloat16",
    cache_dtype="auto",
    quantization="none",
    layout="NHD 2,blocks,16,3,64",
    groups=(GROUP,),
    hash_algorithm="sha256",
    hash_seed="vllm-none-hash",
    tensor_parallel=1,
    pipeline_parallel=1,
)
CHANGES: dict[str, dict[str, Any]] = {
    "model of the same last path part": {"model": "org-b/" + FACTS.model},
    "revision": {"revision": "v2"},
    "epoch": {"epoch": "weights:0012"},
    "model dtype": {"model_dtype": "float32"},
    "cache dtype": {"cache_dtype": "fp8_e4m3"},
    "quantization": {"quantization": "awq"},
    "layout": {"layout": "HND 2,blocks,3,16,64"},
    "kind of group": {"groups": (replace(GROUP, kind="sliding window"),)},
    "block size": {"groups": (replace(GROUP, block_tokens=32),)},
    "object length": {"groups": (replace(GROUP, object_tokens=512),)},
    "layers": {"groups": (replace(GROUP, layer_names=("layers.0",)),)},
    "order of layers": {"groups": (replace(GROUP, layer_names=("layers.1", "layers.0")),)},
    "number of group": {"groups": (replace(GROUP, index=1),)},
    "spec of group": {"groups": (replace(GROUP, spec="MLAAttentionSpec(heads=1)"),)},
    "second group": {"groups": (GROUP, replace(GROUP, index=1))},
    "hash algorithm": {"hash_algorithm": "sha256_cbor"},
    "hash seed": {"hash_seed": "0"},
    "tensor parallel": {"tensor_parallel": 2},
    "pipeline parallel": {"pipeline_parallel": 2},
    "expert parallel": {"other_parallel": (("expert", 2),)},
    "drafter": {"drafter": "mtp/3"},
    "format": {"format_version": 2},
}

HASH = bytes(range(32))


def test_changing_any_one_fact_changes_the_key() -> None:
    maker = key_maker("tenant", FACTS)
    keys = {"unchanged": maker.key(0, 0, HASH)}
    for name, change in CHANGES.items():
        keys[name] = key_maker("tenant", replace(FACTS, **change)).key(0, 0, HASH)
    keys["namespace"] = key_maker("tenant2", FACTS).key(0, 0, HASH)
    keys["group"] = maker.key(1, 0, HASH)
    keys["rank"] = maker.key(0, 1, HASH)
    keys["block hash (tokens, adapter, salt, image)"] = maker.key(0, 0, HASH[::-1])
    assert len(set(keys.values())) == len(keys)


def test_the_matrix_leaves_no_fact_out() -> None:
    changed = {name for change in CHANGES.values() for name in change}
    assert changed == {field.name for field in fields(Facts)}
    in_groups = {
        field.name
        for change in CHANGES.values()
        for group in change.get("groups", ())
        for field in fields(GroupFacts)
        if getattr(group, field.name) != getattr(GROUP, field.name)
    }
    assert in_groups == {field.name for field in fields(GroupFacts)}


def test_equal_facts_have_equal_keys() -> None:
    assert fingerprint(replace(FACTS)) == fingerprint(FACTS)


def test_two_fresh_processes_agree_whatever_their_hash_seed() -> None:
    code = (
        "import sys; from tests.test_keys import FACTS, HASH; from moonstep.keys import key_maker;"
        "print(key_maker('tenant', FACTS).key(0, 0, HASH)); print(len(set('abc')))"
    )
    root = Path(__file__).parent.parent
    keys = set()
    for seed in ("1", "2", "random"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        keys.add(done.stdout.splitlines()[0])
    assert keys == {key_maker("tenant", FACTS).key(0, 0, HASH)}


def test_this_version_makes_these_keys() -> None:
    """A change of this test means that every object stored so far is out of reach."""
    assert fingerprint(FACTS) == "f2e33be1fc582e7bbf9fcdd9c57a79bb"


def test_a_key_is_one_that_stores_take(tmp_path: Path) -> None:
    key = key_maker("tenant.a-b_c", FACTS).key(3, 12, HASH)
    tree = Tree(tmp_path)
    assert tree.key(tree.path(key)) == key


def test_a_key_maker_pickles_small() -> None:
    maker = key_maker("tenant", FACTS)
    pickled = pickle.dumps(maker)
    assert pickle.loads(pickled) == maker
    assert len(pickled) < 200


@pytest.mark.parametrize("namespace", ["", ".", "..", ".a", "a/b", "a b", "a" * 65, "é", None, 3])
def test_a_namespace_that_cannot_be_in_a_key_is_refused(namespace: object) -> None:
    with pytest.raises(SettingError, match=r"^moonstep: namespace="):
        checked_namespace(namespace)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


@given(plain, plain)
def test_canonical_bytes_are_equal_only_for_equal_values(one: object, other: object) -> None:
    def typed(value: object) -> object:
        """Equality that tells 1 from 1.0 and True, and 0.0 from -0.0."""
        if isinstance(value, list):
            return tuple(map(typed, value))
        if isinstance(value, dict):
            return ("map", frozenset((typed(k), typed(v)) for k, v in value.items()))
        return (type(value).__name__, repr(value))

    assert (canonical(one) == canonical(other)) == (typed(one) == typed(other))


def test_what_has_no_plain_value_has_no_canonical_form() -> None:
    for value in (object(), {1, 2}, lambda: None, Facts):
        with pytest.raises(TypeError):
            canonical(value)


class TestEpoch:
    def test_it_starts_as_the_weights_identity(self) -> None:
        assert Epoch("ab").value == Epoch("ab").value != Epoch("cd").value

    def test_after_a_reset_it_is_new_and_never_comes_back(self) -> None:
        epoch, restarted = Epoch("ab"), Epoch("ab")
        seen = {epoch.value}
        for _ in range(3):
            assert epoch.reset()
            assert epoch.value not in seen
            seen.add(epoch.value)
        restarted.reset()
        assert restarted.value not in seen

    def test_a_weights_version_stands_whatever_happens(self) -> None:
        epoch = Epoch("ab", weights_version="7")
        assert epoch.value == Epoch(None, weights_version="7").value != Epoch("7").value
        assert not epoch.reset()
        assert epoch.value == Epoch("cd", weights_version="7").value

    def test_without_weights_or_version_there_is_none(self) -> None:
        epoch = Epoch(None)
        assert epoch.value is None
        assert not epoch.reset()
        assert epoch.value is None

    def test_a_version_cannot_pass_for_an_identity_or_a_nonce(self) -> None:
        epoch = Epoch("ab", nonce=lambda: "cd")
        epoch.reset()
        values = {epoch.value, Epoch("cd").value, Epoch(None, "cd").value}
        assert len(values) == 3


class TestWeightsIdentity:
    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        folder = tmp_path / "org-a" / "model"
        folder.mkdir(parents=True)
        for name in ("model-1.safetensors", "model-2.safetensors"):
            (folder / name).write_bytes(name.encode() * 1000)
        (folder / "config.json").write_text('{"layers": 2}')
        return folder

    def test_it_depends_on_content_alone(self, model: Path, tmp_path: Path) -> None:
        other = tmp_path / "org-b" / "other-name"
        other.mkdir(parents=True)
        for path in sorted(model.iterdir(), reverse=True):
            (other / path.name).write_bytes(path.read_bytes())
        (other / "README.md").write_text("another")
        assert weights_identity(other) == weights_identity(model)

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: (model / "model-2.safetensors").write_bytes(b"x" * 19_000),
            lambda model: (model / "model-2.safetensors").write_bytes(b"short"),
            lambda model: (model / "model-2.safetensors").unlink(),
            lambda model: (model / "model-3.safetensors").write_bytes(b""),
            lambda model: (model / "config.json").write_text('{"layers": 3}'),
            lambda model: (model / "config.json").unlink(),
        ],
    )
    def test_any_change_of_content_changes_it(
        self, model: Path, change: Callable[[Path], object]
    ) -> None:
        before = weights_identity(model)
        change(model)
        assert weights_identity(model) not in (before, None)

    def test_no_weights_no_identity(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert weights_identity(tmp_path) is None
        assert weights_identity(tmp_path / "missing") is None

    def test_one_file_is_a_model_too(self, model: Path) -> None:
        assert weights_identity(model / "model-1.safetensors") is not None

    def test_a_large_shard_is_sampled_over_its_whole_length(self, tmp_path: Path) -> None:
        nbytes = 64 << 20
        path = tmp_path / "model.safetensors"
        with path.open("wb") as file:
            file.truncate(nbytes)
        identities = {weights_identity(tmp_path)}
        for start in sample_starts(nbytes):
            with path.open("r+b") as file:
                file.seek(start + SAMPLE_BYTES // 2)
                file.write(b"x")
            identities.add(weights_identity(tmp_path))
        assert len(identities) == SAMPLES_PER_SHARD + 1


def test_a_fingerprint_is_32_hex_digits() -> None:
    maker = KeyMaker("n", fingerprint(FACTS))
    assert len(bytes.fromhex(maker.fingerprint)) == 16
