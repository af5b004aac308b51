"""A worker process: descriptions of tasks in, files written, progress out, over one pipe.

Started by data_prep.pool as `python -m data_prep.worker FD PARENT` in a fresh interpreter, so that nothing the
parent holds (threads, locks, a tokenizer, torch) comes along. It ends when its pipe or its parent does.
"""

import ctypes
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from data_prep.duplicates import write_signatures
from data_prep.encode import Progress, ShardEncoder
from data_prep.errors import UserError
from data_prep.files import file_digest
from data_prep.manifest import SourceFile
from data_prep.parts import save_source, signatures_path, tokenizer_copy_path
from data_prep.pool import HashSource, Ready, SignShard
from data_prep.tokenizers import load_tokenizer

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def serve(connection: Connection) -> None:
    """Receive EncodeOptions, then a Task after each Ready."""
    options = connection.recv()
    try:
        tokenizer = load_tokenizer(tokenizer_copy_path(options.folder), backend=options.backend)
    except UserError as error:
        connection.send(error)
        return
    encoder = ShardEncoder(tokenizer, options)
    while True:
        try:
            connection.send(Ready(_resident_bytes()))
            task = connection.recv()
        except (EOFError, ConnectionError):  # the parent has no more work, or has died
            return
        try:
            if isinstance(task, HashSource):
                save_source(options.folder, task.number, SourceFile(task.source, *file_digest(Path(task.source))))
            elif isinstance(task, SignShard):
                path = signatures_path(options.folder, options.plan, task.number)
                write_signatures(path, task.shard, options.read, options.duplicates)
                connection.send(Progress(source_bytes=task.shard.num_bytes))
            else:
                encoder.encode(task.number, task.shard, task.drop, connection.send)
        except ConnectionError:  # the parent was stopped meanwhile and says so itself
            return
        except (UserError, OSError) as error:
            connection.send(error)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _end_with_parent(parent: int) -> None:
    """Be killed when the parent is: the next run may write the same part."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        sys.exit(1)


if __name__ == "__main__":
    _end_with_parent(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
