"""The one exception that means 'the user can mend this'."""


class UserError(ValueError):
    """A mistake in the input or on the command line; its message is one line with the way out.

    The command lines print it as `error: ...` and exit with 2. Anything else is a bug and keeps its
    traceback.
    """
