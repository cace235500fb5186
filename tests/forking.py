"""Functions run in forked children: each has an environment of its own, and may die."""

import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any


class Child:
    """A forked process that runs ``function()``; what it returns or raises comes back with :meth:`result`."""

    def __init__(self, function: Callable[[], Any], environment: dict[str, str] | None = None):
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reader)
            outcome: tuple[bool, Any]
            try:
                os.environ.update(environment or {})
                outcome = True, function()
            except BaseException as error:
                traceback.print_exc()
                outcome = False, error
            with os.fdopen(writer, "wb") as stream:
                pickle.dump(outcome, stream)
            os._exit(0)
        os.close(writer)

    def result(self) -> Any:
        with os.fdopen(self._reader, "rb") as stream:
            data = stream.read()
        _, status = os.waitpid(self.pid, 0)
        assert data, f"the child died with status {os.waitstatus_to_exitcode(status)}"
        good, value = pickle.loads(data)
        if not good:
            raise value
        return value

    def exit_code(self) -> int:
        """For a child that is expected to die."""
        os.close(self._reader)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def in_child(function: Callable[[], Any], environment: dict[str, str] | None = None) -> Any:
    return Child(function, environment).result()
