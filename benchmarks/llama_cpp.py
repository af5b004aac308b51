"""A plain export in llama.cpp: equal token ids, and greedy continuations of ten prompts. JSON lines.

Not part of the tests: llama-cpp-python comes as source only, and compiling it takes about 15 minutes.

    pip install llama-cpp-python==0.3.36
    pip download --no-binary :all: --no-deps llama-cpp-python==0.3.36 && tar xf llama_cpp_python-0.3.36.tar.gz
    python benchmarks/llama_cpp.py hf/NAME llama_cpp_python-0.3.36/vendor/llama.cpp/convert_hf_to_gguf.py

The source package holds the converter, which needs no build. Export with --dtype fp32: llama.cpp's logits lay
within 8e-3 of transformers' there, so a continuation may part where two tokens are as likely as each other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "The ",
    "Once upon a time",
    "def f(x):\n    return ",
    "1 + 1 =",
    "naïve 中文 🙂",
    "\n\n",
    "In 1969 the first ",
    "  two  spaces",
    "Dear Sir or Madam,\n",
    "<p>",
)
NUM_NEW = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="a plain export")
    parser.add_argument("converter", type=Path, help="convert_hf_to_gguf.py of llama.cpp")
    options = parser.parse_args()
    import llama_cpp  # pyright: ignore[reportMissingImports]

    model = AutoModelForCausalLM.from_pretrained(options.export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.export)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        convert = [sys.executable, str(options.converter), str(options.export), "--outfile", str(path)]
        subprocess.run([*convert, "--outtype", "f32"], check=True, stdout=sys.stderr)
        llama = llama_cpp.Llama(model_path=str(path), n_ctx=0, verbose=False)
        failures = 0
        for prompt in PROMPTS:
            ids = [tokenizer.bos_token_id, *tokenizer.encode(prompt)]
            theirs = llama.tokenize(prompt.encode(), add_bos=False, special=False)
            expected = model.generate(torch.tensor([ids]), max_new_tokens=NUM_NEW, do_sample=False)[0, len(ids) :]
            found = []
            for token in llama.generate(ids, temp=0.0, repeat_penalty=1.0):
                found.append(token)
                if len(found) == NUM_NEW or token == tokenizer.eos_token_id:
                    break
            same = {"ids": theirs == ids[1:], "continuation": found == expected.tolist()}
            print(json.dumps({"prompt": prompt, **same}))
            failures += not all(same.values())
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
