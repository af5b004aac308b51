"""The one exception that means 'the user can mend this', and what to say of any other in one line."""


class UserError(ValueError):
    """A mistake in the input or on the command line; its message is one line with the way out.

    The command lines print it as `error: ...` and exit with 2. Anything else is a bug and keeps its
    traceback.
    """


def one_line(error: BaseException) -> str:
    """What went wrong, in one line. torch hides the disk's own error behind one about its archive."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    if cause is None:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    if cause.strerror is None:
        return str(cause)
    return cause.strerror if cause.filename is None else f"{cause.filename}: {cause.strerror}"
