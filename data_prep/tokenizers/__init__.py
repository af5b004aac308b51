"""One protocol for all tokenizers: SentencePiece models, Hugging Face's tokenizer.json, tiktoken's rank files.

No text can produce a control token: a literal `</s>` or `<|endoftext|>` in a document is encoded as ordinary text.
A tokenizer is one file, whose `content` travels with each dataset and run; its kind is told by that content.
"""

from data_prep.tokenizers.loading import BACKENDS, Backend, load_tokenizer
from data_prep.tokenizers.protocol import Tokenizer

__all__ = ["BACKENDS", "Backend", "Tokenizer", "load_tokenizer"]
