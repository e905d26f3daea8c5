"""Templates by name."""

from typing import Any

from twinkle.plugin import Plugin, is_plugin_id
from twinkle.template.base import Template
from twinkle.template.errors import UnknownTemplate
from twinkle.template.qwen import Qwen3_5Template

_TEMPLATES: dict[str, type[Template]] = {kind.__name__: kind for kind in (Template, Qwen3_5Template)}


def template_names() -> tuple[str, ...]:
    """Return the names `build_template` takes, sorted."""
    return tuple(sorted(_TEMPLATES))


def build_template(template: 'str | type[Template] | Template', **options: Any) -> Template:
    """Return a template given by name, class, instance or, where plugins are allowed, as a plugin's id.

    Args:
        options: of its constructor, `model_id` among them; none beside an instance.

    Raises:
        UnknownTemplate: the name is not registered.
        PluginRefused: plugins are not allowed, or this one does not hold exactly one template.
        TypeError: options beside an instance, or options the constructor does not take.
    """
    if isinstance(template, Template):
        if options:
            raise TypeError(f'a template that is already built takes no options, got {sorted(options)}')
        return template
    if isinstance(template, str):
        kind = Plugin.load_plugin(template, Template) if is_plugin_id(template) else _TEMPLATES.get(template)
        if kind is None:
            raise UnknownTemplate(f'there is no template {template!r}; there are {", ".join(template_names())}')
        return kind(**options)
    return template(**options)
