"""A plain export in llama.cpp: equal token ids, and greedy continuations of ten prompts. JSON lines.

Not part of the tests, because the converter is in no package. It lies in the source package of llama-cpp-python
and needs no build; xllamacpp is llama.cpp, built already:

    pip install xllamacpp
    pip download --no-binary :all: --no-deps llama-cpp-python==0.3.36 && tar xf llama_cpp_python-0.3.36.tar.gz
    python benchmarks/llama_cpp.py hf/NAME llama_cpp_python-0.3.36/vendor/llama.cpp

Export with --dtype fp32. llama.cpp's logits lay within 8e-3 of transformers' there, so a continuation may part
where two tokens are nearly as likely as each other: "lead" is by how much transformers' choice led the other's
there, in logits, and null where nothing parts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep.sample import sample_corpus_path
from data_prep.sources import iter_documents

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
LEAD = 0.02
"""Logits of both programs may lie this far apart in sum."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="a plain export")
    parser.add_argument("llama_cpp", type=Path, help="llama.cpp's source folder, for convert_hf_to_gguf.py")
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(options.export, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.export)
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        convert(options.export, options.llama_cpp, path)
        ask = server(path)

        def tokenized(text: str) -> list[int]:
            return ask("/tokenize", {"content": text, "add_special": False, "parse_special": False})["tokens"]

        texts = [document.text for document in islice(iter_documents([sample_corpus_path()]), 0, None, 16)]
        differ = sum(tokenized(text) != tokenizer.encode(text) for text in texts)
        print(json.dumps({"documents": len(texts), "encoded_otherwise": differ}))
        failures += differ
        for prompt in PROMPTS:
            ids = tokenizer.encode(prompt)
            asked = [tokenizer.bos_token_id, *ids]
            sampling = {"temperature": 0, "return_tokens": True, "cache_prompt": False}
            found = ask("/completion", {"prompt": asked, "n_predict": NUM_NEW, **sampling})["tokens"]
            greedy = model.generate(torch.tensor([asked]), max_new_tokens=NUM_NEW, do_sample=False)[0].tolist()
            lead = lead_where_they_part(model, greedy, len(asked), found)
            print(json.dumps({"prompt": prompt, "ids": tokenized(prompt) == ids, "lead": lead}))
            failures += tokenized(prompt) != ids or (lead or 0.0) > LEAD
    return int(failures > 0)


def lead_where_they_part(model: Any, greedy: list[int], start: int, found: list[int]) -> float | None:
    """Logits between transformers' token and llama.cpp's at the first that differs; the prompt has `start`."""
    for position, (ours, theirs) in enumerate(zip(greedy[start:], found, strict=False), start=start):
        if ours != theirs:
            logits = model(torch.tensor([greedy[:position]])).logits[0, -1]
            return (logits[ours] - logits[theirs]).item()
    return None


def convert(export: Path, llama_cpp: Path, gguf: Path) -> None:
    """Write an export in llama.cpp's own format."""
    search_path = os.pathsep.join(filter(None, [str(llama_cpp / "gguf-py"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(llama_cpp / "convert_hf_to_gguf.py"), str(export), "--outfile", str(gguf)]
    environment = {**os.environ, "PYTHONPATH": search_path}
    subprocess.run([*command, "--outtype", "f32"], check=True, stdout=sys.stderr, env=environment)


def server(gguf: Path) -> Callable[[str, dict[str, Any]], Any]:
    """llama.cpp's server, in this process: path and question → answer."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(gguf)
    running = xllamacpp.Server(parameters)

    def ask(path: str, question: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            running.listening_address + path, json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    return ask


if __name__ == "__main__":
    sys.exit(main())
