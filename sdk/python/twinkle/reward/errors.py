"""What cannot be scored."""


class InvalidRewardInput(ValueError):
    """A trajectory, a ground truth or an option is of no use to the reward."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f'{field} {problem}')
        self.field = field
        """The argument, and the place in it where there is one."""
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.field, self.problem)


class InvalidRewardOutput(ValueError):
    """A reward of a user's own did not return a finite number for each trajectory."""

    def __init__(self, reward: str, problem: str) -> None:
        super().__init__(f'{reward} {problem}')
        self.reward, self.problem = reward, problem

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.reward, self.problem)


class SandboxUnavailable(RuntimeError):
    """This machine cannot put up walls that were asked for, so no program was run."""

    def __init__(self, walls: tuple[str, ...]) -> None:
        super().__init__(
            f'this machine has no walls around {", ".join(walls)}; Linux 5.13 on x86-64 has all of them. To run '
            f'programs without, in a container or machine of their own, say so: without_walls={walls!r}'
        )
        self.walls = walls

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        return type(self), (self.walls,)


class ProgramNotStarted(RuntimeError):
    """The interpreter that should have run a program ended before it put up its walls."""

    def __init__(self, exit_code: int, stderr: str) -> None:
        super().__init__(
            f'the interpreter ended with exit code {exit_code} before the program began; if it lacked memory or time, '
            f'raise memory_bytes or cpu_seconds. It said: {stderr[-2000:].strip() or "nothing"}'
        )
        self.exit_code, self.stderr = exit_code, stderr

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        return type(self), (self.exit_code, self.stderr)
