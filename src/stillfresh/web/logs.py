"""The log of a `serve` process, as `[log]` says (G16): where lines go, and what is hidden."""

import logging
from collections.abc import Iterator

from stillfresh.logs import Hidden, LineHandler, LineWriter, passwords_in
from stillfresh.server import AccessLog
from stillfresh.web.config import Settings


class ProcessLog:
    """Set logging up, unless it is already; libraries log from warnings up."""

    def __init__(self, settings: Settings) -> None:
        asked = settings.log
        self.hide = Hidden(secrets_of(settings))
        self.writer = LineWriter()
        handler = LineHandler(self.writer, self.hide, is_json=asked.format == "json")
        handler.setLevel(asked.level.upper())
        logging.basicConfig(handlers=[handler])
        logging.getLogger("stillfresh").setLevel(asked.level.upper())
        access = AccessLog(self.writer, self.hide, is_json=asked.access == "json")
        self.access = None if asked.access == "off" else access


def secrets_of(settings: Settings) -> Iterator[str]:
    """The secrets in the settings."""
    server, outbox = settings.server, settings.outbox
    yield server.token or ""
    urls = [settings.store.url, server.authenticate_url]
    urls += [settings.pages.upstream] if settings.pages is not None else []
    urls += [outbox.database] if outbox is not None else []
    for kind in settings.kinds:
        urls += [kind.url, kind.batch_url]
        for value in kind.headers.values():
            yield value
            yield value.rpartition(" ")[2]
    for url in urls:
        yield from passwords_in(url or "")
