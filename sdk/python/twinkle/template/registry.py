"""Registry of templates by name."""

from typing import Any

from twinkle.plugin import Plugin, is_plugin_id
from twinkle.template.base import Template
from twinkle.template.errors import UnknownTemplate
from twinkle.template.qwen import Qwen3_5Template

_TEMPLATES: dict[str, type[Template]] = {kind.__name__: kind for kind in (Template, Qwen3_5Template)}


def template_names() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_TEMPLATES))


def build_template(template: 'str | type[Template] | Template', **options: Any) -> Template:
    """Return a template given by name, class, instance or plugin id.

    Args:
        template: a registered name, a class, an instance (returned unchanged) or, if plugins are allowed, the id of a
            plugin.
        options: arguments of the constructor, including `model_id`; not allowed with an instance.

    Raises:
        UnknownTemplate: the name is not registered.
        PluginRefused: plugins are not allowed, or the plugin does not contain exactly one template.
        TypeError: options are given with an instance, or the constructor does not accept them.
        HubError, TemplateError, ValueError: the constructor failed; see `Template`.
    """
    if isinstance(template, Template):
        if options:
            raise TypeError(f'a template that is already built takes no options, got {sorted(options)}')
        return template
    if isinstance(template, str):
        kind = Plugin.load_plugin(template, Template) if is_plugin_id(template) else _TEMPLATES.get(template)
        if kind is None:
            raise UnknownTemplate(f'unknown template {template!r}; use one of {", ".join(template_names())}')
        return kind(**options)
    return template(**options)
