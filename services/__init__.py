"""The services of Twinkle. They meet over the wire and never import each other; `services.kit` is shared."""

__all__: list[str] = []
