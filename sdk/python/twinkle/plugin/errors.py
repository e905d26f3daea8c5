"""The error raised for plugins that are not loaded."""


class PluginRefused(ValueError):
    """A plugin is not allowed here, or does not contain the requested class or function."""

    def __init__(self, plugin: str, problem: str) -> None:
        super().__init__(plugin, problem)
        self.plugin, self.problem = plugin, problem

    def __str__(self) -> str:
        return f'plugin {self.plugin}: {self.problem}'
