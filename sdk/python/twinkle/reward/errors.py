"""Errors raised by rewards and by the sandbox."""

from twinkle.errors import error_class


@error_class('{field} {problem}')
class InvalidRewardInput(ValueError):
    """A trajectory, a ground truth or an option is invalid for the reward."""

    field: str
    """Path of the invalid value, such as `trajectories[0].messages`."""
    problem: str


@error_class('{reward} {problem}')
class InvalidRewardOutput(ValueError):
    """A user-defined reward did not return one finite number per trajectory."""

    reward: str
    problem: str


@error_class()
class SandboxUnavailable(RuntimeError):
    """This machine does not support a required wall of the sandbox, so no program was run."""

    walls: tuple[str, ...]
    """Missing walls."""

    def __str__(self) -> str:
        return (
            f'this machine does not support the sandbox walls {", ".join(self.walls)}; Linux 5.13 or later on x86-64 '
            f'supports all. To run programs without them, inside a container or virtual machine, pass '
            f'without_walls={self.walls!r}'
        )


@error_class()
class ProgramNotStarted(RuntimeError):
    """The interpreter exited before the sandbox was set up, so the program was not run."""

    exit_code: int
    stderr: str

    def __str__(self) -> str:
        return (
            f'the interpreter exited with code {self.exit_code} before the program started; if memory or time ran '
            f'out, raise memory_bytes or cpu_seconds. Its error output: {self.stderr[-2000:].strip() or "(empty)"}'
        )
