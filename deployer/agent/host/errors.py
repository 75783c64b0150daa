"""Errors of the agent, as data for the client."""


class AgentError(Exception):
    """`kind` is usage, host, unknown_job or need; the client turns it into its own error with the right exit code."""

    def __init__(self, kind: str, message: str, hint: str = "") -> None:
        Exception.__init__(self, message)
        self.kind = kind
        self.message = message
        self.hint = hint


class SetupFailed(AgentError):
    """A job's setup command has ended with `code`; 0 if there is no code."""

    def __init__(self, code: int, message: str, hint: str = "") -> None:
        AgentError.__init__(self, "host", message, hint)
        self.code = code
