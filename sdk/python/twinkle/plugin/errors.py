"""Why a plugin is not loaded."""


class PluginRefused(ValueError):
    """A plugin is not allowed here, or is not what it is asked for as; none of its names are used."""

    def __init__(self, plugin: str, problem: str) -> None:
        super().__init__(plugin, problem)
        self.plugin, self.problem = plugin, problem

    def __str__(self) -> str:
        return f'plugin {self.plugin}: {self.problem}'
