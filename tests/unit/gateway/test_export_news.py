"""News of exports reach all that listen, and those alone."""

import asyncio

from services.gateway.exports.export_news import ExportNews


async def test_news_reach_all_that_listen() -> None:
    """Also where somebody tells twice before they wake."""
    news = ExportNews()
    with news.heard() as first, news.heard() as second:
        assert not first.done()
        news.tell()
        news.tell()
        assert (await first, await second) == (None, None)


async def test_what_is_told_before_the_wait_is_not_missed() -> None:
    """Whoever looks inside of the block and finds nothing still wakes at once."""
    news = ExportNews()
    with news.heard() as heard:
        news.tell()
        done, _ = await asyncio.wait({heard})
        assert done == {heard}


async def test_old_news_wake_nobody() -> None:
    """Each block hears what is told during it."""
    news = ExportNews()
    with news.heard():
        news.tell()
    with news.heard() as later:
        assert not later.done()
