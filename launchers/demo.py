"""The whole path on the sample corpus, each stage by the command that a user would type: `make demo`."""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORPUS = "data_prep/sample_corpus/minipile.jsonl.zst"
TOKENIZER, DATASET, RUN = "data/demo/tokenizer.model", "data/demo/sample", "runs/demo"

# (a file that says the stage is done, or None to run it always; its command)
STAGES: list[tuple[str | None, str]] = [
    (TOKENIZER, f"python -m data_prep.train_tokenizer --input {CORPUS} --vocab_size 8192 --output {TOKENIZER}"),
    (
        f"{DATASET}.manifest.json",
        f"python -m data_prep.preprocess --input {CORPUS} --tokenizer {TOKENIZER} --output_prefix {DATASET} "
        "--workers 2 --overwrite",
    ),
    (None, f"python -m data_prep.verify {DATASET}"),
    (None, "deepspeed launchers/pretrain.py --ds_config ds_configs/zero2.json"),
    (None, f"python launchers/evaluate.py --checkpoint {RUN} --data {DATASET}"),
    (None, f"python launchers/export_hf.py --checkpoint {RUN} --output hf/demo --overwrite"),
    (
        None,
        f"python launchers/generate.py --checkpoint {RUN} --prompt 'The people of the United States' "
        "--temperature 0.6 --top_p 0.9 --max_new_tokens 120",
    ),
]


def main() -> int:
    start = time.monotonic()
    for product, command in STAGES:
        if product is not None and (ROOT / product).is_file():
            continue
        print(f"\n[{time.monotonic() - start:4.0f} s] $ {command}", flush=True)
        program, *arguments = shlex.split(command)
        here = sys.executable if program == "python" else str(Path(sys.executable).with_name(program))
        status = subprocess.run([here, *arguments], cwd=ROOT, check=False).returncode
        if status:
            print(f"error: the stage above ended with status {status}", file=sys.stderr)
            return status
    summary = json.loads((ROOT / RUN / "summary.json").read_text())
    print(f"\n[{time.monotonic() - start:4.0f} s] {RUN}/summary.json: {json.dumps(summary, indent=2)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # the stage said what there is to say
