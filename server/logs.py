"""The log: loguru on stderr, as text or as lines of JSON; what libraries log goes there too."""

import json
import logging
import sys
import traceback
from typing import TYPE_CHECKING

from loguru import logger

from specserve.server.config import LogOptions

if TYPE_CHECKING:
    from loguru import Record

_TEXT_FORMAT = "{time:YYYY-MM-DD HH:mm:ss.SSS} {level: <7} {message}"


class _ToLoguru(logging.Handler):
    """Passes on what libraries log with the standard library."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log it under the name of its level, or its number."""
        try:
            level: str | int = logger.level(record.levelname).name
        except ValueError:
            level = record.levelno
        logger.opt(exception=record.exc_info).log(level, "{}: {}", record.name, record.getMessage())


def configure_logging(options: LogOptions) -> None:
    """Set the log of this process up; what was there before is replaced."""
    logger.remove()
    # diagnose would write values of variables, and so prompts, into stack traces.
    logger.add(
        sys.stderr,
        level=options.level.upper(),
        format=_json_format if options.json else _TEXT_FORMAT,
        backtrace=False,
        diagnose=False,
        colorize=False,
    )
    logging.basicConfig(handlers=[_ToLoguru()], level=logging.WARNING, force=True)


def _json_format(record: "Record") -> str:
    """A format string with the whole line in it."""
    fields = {key: value for key, value in record["extra"].items() if key != "_line"}
    line = {"time": record["time"].isoformat(), "level": record["level"].name.lower(), "message": record["message"]}
    if record["exception"] is not None:
        line["exception"] = "".join(traceback.format_exception(record["exception"].value))
    record["extra"]["_line"] = json.dumps(line | fields, ensure_ascii=False, default=str)
    return "{extra[_line]}\n"
