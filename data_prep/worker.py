"""A worker process: batches of raw lines in, token ids out, over one pipe.

Started by data_prep.encode as `python -m data_prep.worker FD` in a fresh interpreter, so that nothing the
parent holds (threads, locks, a tokenizer, torch) comes along. It ends when its pipe does.
"""

import sys
from multiprocessing.connection import Connection

from data_prep.batches import encode_batch
from data_prep.errors import UserError
from data_prep.tokenizers import load_tokenizer


def serve(connection: Connection) -> None:
    """Receive EncodeOptions, then answer each Batch with an EncodedBatch or the UserError it met."""
    options = connection.recv()
    tokenizer = load_tokenizer(options.tokenizer)
    while True:
        try:
            batch = connection.recv()
        except (EOFError, ConnectionError):  # the parent has no more work, or has died
            return
        try:
            answer = encode_batch(batch, tokenizer, options)
        except UserError as error:
            answer = error
        try:
            connection.send(answer)
        except ConnectionError:  # the parent was stopped meanwhile and says so itself
            return


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
