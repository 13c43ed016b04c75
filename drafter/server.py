"""The server process: loads what FOLDER holds, warms up, listens, and goes down in order.

Usage: python -m drafter.server --weights FOLDER [--listener NUMBER]

Environment: HOST (127.0.0.1), PORT (8000), MODEL_NAME (submission). Exit codes: 0 after SIGTERM or SIGINT;
2 for what its user can mend (a missing or damaged file, a taken port), with a sentence on stderr; 1 for a
fault that a fresh process may not have.
"""

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from drafter import connections, logs
from drafter.app import Service
from drafter.batcher import Batcher
from drafter.connections import Connection
from drafter.limits import Limits
from drafter.listener import bind, no_listener
from drafter.metrics import Metrics
from drafter.settings import WEIGHTS, Address, Settings, Sums, require

if TYPE_CHECKING:
    from drafter.engine import Engine

TOLD = (signal.SIGTERM, signal.SIGINT)
GRACE_S = 7.0  # for the answers that are under way when the server is told to stop
LAST_WORDS_S = 0.5
ARRIVAL_S = 0.05  # for requests that are on their way in when it is told
START_S = 240.0  # a server that is not up by then never will be; who waits 300 s for one can have the next
DEAF_S = 25.0  # an event loop that stands still for so long answers nobody any more: the process ends
STALL_S = 60.0  # a GPU needs no second for a step ...
PLAIN_STALL_S = 200.0  # ... but plain torch may have a long prompt to read
PLAIN_NEW_TOKENS = 8_192  # and reads only so many in one step: 256 for each of 32 conversations that begin


class RefusalError(Exception):
    """It cannot be served as it is; says what is to be mended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; see the module's head for the exit codes."""
    parser = argparse.ArgumentParser(
        prog="drafter.server", description="Serve drafts over HTTP.",
        epilog="Environment: HOST (127.0.0.1), PORT (8000), MODEL_NAME (submission).",
    )
    parser.add_argument("--weights", type=Path, required=True, metavar="FOLDER",
                        help="the folder of model.safetensors, serving.json and SHA256SUMS")
    parser.add_argument("--listener", type=int, metavar="NUMBER",
                        help="an open socket to listen on, instead of one at HOST and PORT")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    arguments = parser.parse_args(argv)
    logs.configure(arguments.log_level)
    faulthandler.dump_traceback_later(START_S, exit=True, file=logs.STDERR)
    for number in TOLD:  # until the loop takes over
        signal.signal(number, _leave)
    try:
        return _run(arguments.weights, arguments.listener)
    except RefusalError as error:
        logs.tell(f"drafter: {error}")
        return 2
    except Exception as error:
        logs.event(logging.CRITICAL, "start failed", error=logs.described(error))
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run(folder: Path, handle: int | None) -> int:
    try:
        address = Address.from_environment(os.environ)
        listener = bind(address) if handle is None else socket.socket(fileno=handle)
        settings = Settings.read(folder)
        require(folder / WEIGHTS)
        # The weights have sums by tensor, too; those of whole files are taken beside.
        with ThreadPoolExecutor(1) as beside:
            summed = beside.submit(Sums.check, folder)
            # Importing torch takes seconds; a taken port or a missing file need not wait for it.
            from drafter import loading  # noqa: PLC0415

            engine = loading.open_engine(folder, settings)
        sums = summed.result()
    except (ValueError, OSError, ImportError) as error:
        raise RefusalError(str(error)) from error
    loading.warm_up(engine, settings)  # what fails from here on may go well without kernels
    return asyncio.run(serve(engine, settings, address, sums, listener))


def _leave(_number: int, _frame: object) -> NoReturn:
    os._exit(0)  # nothing is under way that would have to end in order


async def serve(engine: "Engine", settings: Settings, address: Address, sums: Sums,
                listener: socket.socket) -> int:
    """Answer requests until a signal or a fault that sticks; return the exit code.

    Sanic's own `run` is not used: its manager kills workers that load for long, and its single process
    swallows a taken port and leaves kept-alive connections open through the whole time of grace.
    """
    stop = asyncio.Event()
    for number in TOLD:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stall_s, new_tokens = (PLAIN_STALL_S, PLAIN_NEW_TOKENS) if engine.mode == "plain" else (STALL_S, 0)
    limits = Limits(draft_tokens=settings.draft_tokens, max_batch=settings.max_batch, stall_s=stall_s,
                    new_tokens=new_tokens)
    metrics = Metrics()
    metrics.watch(engine)
    batcher = Batcher(engine.draft, limits, metrics, engine.unread if new_tokens else len)
    service = Service(settings, address, sums, engine.decoder.config.vocab_size, batcher)
    batcher.start()
    server = await _listen(service, address, listener)
    host, port = listener.getsockname()[:2]
    logs.event(logging.INFO, "listening", host=host, port=port, model=address.model_name,
               weights_sha256=sums.weights)
    waits = [asyncio.create_task(event.wait()) for event in (stop, batcher.given_up)]
    heart = asyncio.create_task(_beat())
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    code = 0 if stop.is_set() else 1
    logs.event(logging.INFO, "stopping", code=code, open_connections=len(server.connections))
    if code == 0:
        await asyncio.sleep(ARRIVAL_S)  # after a fault, what is on its way is the next server's
    await _go_down(service, server, LAST_WORDS_S if code else GRACE_S)
    heart.cancel()
    logs.event(logging.INFO, "stopped", code=code)
    if batcher.busy or server.connections or code:
        # A step that hangs in the device would hold up an orderly exit for ever; so would a half-sent body.
        _exit_now(code)
    return code


async def _beat() -> None:
    """While the event loop runs, put off the end of a process whose event loop stands still.

    The timer is a thread in C, so not even a library that never lets go of the interpreter holds it up.
    """
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            faulthandler.dump_traceback_later(DEAF_S, exit=True, file=logs.STDERR)
            await asyncio.sleep(DEAF_S / 12)
    faulthandler.cancel_dump_traceback_later()


async def _go_down(service: Service, server: Any, grace_s: float) -> None:
    """Answer what was accepted, and accept no more."""
    service.draining = True
    server.server.close()
    await asyncio.sleep(ARRIVAL_S)
    await _drain(server, grace_s)
    service.batcher.stop()
    await _drain(server, LAST_WORDS_S)


async def _listen(service: Service, address: Address, listener: socket.socket) -> Any:
    try:
        app = service.app()
        app.config.MOST_CONNECTIONS = connections.bound()
        server: Any = await app.create_server(
            sock=listener, backlog=connections.BACKLOG, return_asyncio_server=True, protocol=Connection,
            asyncio_server_kwargs={"start_serving": False},  # no request may come before the routes are ready
        )
        await server.startup()
        await server.start_serving()
        return server
    except OSError as error:  # two servers may bind; only one may listen
        raise RefusalError(str(no_listener(address, error))) from error


async def _drain(server: Any, patience_s: float) -> None:
    """Close what is idle until no connection is left, for at most `patience_s` seconds."""
    end = time.monotonic() + patience_s
    while server.connections and time.monotonic() < end:
        for connection in list(server.connections):
            if not connection.recv_buffer:  # its next request may have come in already
                connection.close_if_idle()
        await asyncio.sleep(0.02)


def _exit_now(code: int) -> NoReturn:
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
