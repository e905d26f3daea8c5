"""Errors of scoring trajectories."""

from twinkle.errors import error_class


@error_class('{field} {problem}')
class InvalidRewardInput(ValueError):
    """A reward cannot use a trajectory, a ground truth or an option."""

    field: str
    """Argument, with the position in it where there is one."""
    problem: str


@error_class('{reward} {problem}')
class InvalidRewardOutput(ValueError):
    """A user-defined reward did not return one finite number per trajectory."""

    reward: str
    problem: str


@error_class()
class SandboxUnavailable(RuntimeError):
    """This machine lacks isolation mechanisms that were requested, so no program was run."""

    walls: tuple[str, ...]
    """Missing isolation mechanisms."""

    def __str__(self) -> str:
        return (
            f'this machine has no walls around {", ".join(self.walls)}; Linux 5.13 on x86-64 has all of them. To run '
            f'programs without them, inside a container or on a separate machine, pass without_walls={self.walls!r}'
        )


@error_class()
class ProgramNotStarted(RuntimeError):
    """The interpreter of a program ended before it had set up its isolation."""

    exit_code: int
    stderr: str

    def __str__(self) -> str:
        return (
            f'the interpreter ended with exit code {self.exit_code} before the program began; if memory or time was '
            f'short, raise memory_bytes or cpu_seconds. Its output: {self.stderr[-2000:].strip() or "none"}'
        )
