"""Whether an address is free, told before gRPC tries it.

gRPC would take over the unix socket of a running server, is content if one of a host name's addresses is free,
and logs lines of its own where none is.
"""

import os
import socket
import stat
from pathlib import Path


class ListenError(Exception):
    """An address can't be listened on; the message names it."""


def check_tcp(hostname: str, port: int) -> None:
    """Raise ListenError unless every address of hostname can be bound at this port."""
    where = f"{hostname}:{port} (--hostname, --port)"
    try:
        infos = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ListenError(f"can't listen on {where}: the host name does not resolve: {error}") from error
    for family, kind, protocol, _, address in infos:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                probe.listen(1)
            except OSError as error:
                reason = error.strerror or str(error)
                raise ListenError(f"can't listen on {where}: {reason.lower()}") from error


def check_unix(path: Path) -> None:
    """Raise ListenError unless a unix socket can be made at `path`; remove one that nobody listens on."""
    where = f"{path} (--unix-socket)"
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ListenError(f"can't listen on {where}: its directory is missing or not writable") from None
        return
    except OSError as error:
        raise ListenError(f"can't listen on {where}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"can't listen on {where}: there is a file which is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise ListenError(f"can't listen on {where}: {error.strerror}") from error
    raise ListenError(f"can't listen on {where}: another server does")
