"""The engine core at work for another process."""

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import zmq

from rackmount.decisions import decisions
from rackmount.engine.core import EngineCore, Event
from rackmount.execution.codec import MessageCodec
from rackmount.execution.messages import RankSetup
from rackmount.execution.program import Live
from rackmount.garbage import collector_paused
from rackmount.loading.locate import open_model
from rackmount.rack import Rack, draft_rack, dtype_name
from rackmount.report import startup_report
from rackmount.serving import messages
from rackmount_registry.errors import RequestError
from rackmount_registry.executor import RankError
from rackmount_registry.plain import as_plain
from rackmount_registry.plugins import PluginManager

STATS_S = 0.25
"""Between two statistics, at least."""

LAST_WORDS_S = 10
"""For the front end to hear why the engine core ends."""

_log = logging.getLogger(__name__)


def serve(peer: zmq.Socket[bytes]) -> bool:
    """Builds the engine core that the first message asks for, and runs it until `Close`: True.
    Whatever ends it otherwise is told to `peer`."""
    mail, core = Mail(peer), None
    try:
        core = _build(mail.take(), mail)
        # A full collection would look through all that is loaded, for 100 ms in which no step goes.
        gc.collect()
        gc.freeze()
        CoreLoop(core, mail).run()
    except BaseException as error:
        mail.send(messages.Trouble.of(error))  # first: closing may take as long as it takes
        try:
            if core is not None:
                core.close()
        finally:
            mail.await_close()
        return False
    gc.unfreeze()  # it ends as any other process does
    core.close()
    return True


class Mail:
    """Messages by a socket."""

    def __init__(self, peer: zmq.Socket[bytes]) -> None:
        self.poll = peer.poll
        self._peer = peer
        self._codec = MessageCodec(messages.ToCore)

    def send(self, message: messages.FromCore) -> None:
        self._peer.send(self._codec.encode(message))

    def take(self) -> Any:
        return self._codec.decode(self._peer.recv())

    def await_close(self) -> None:
        """Until all that was sent is heard: ZeroMQ loses what waits for a peer that is behind, once
        its sender is gone."""
        deadline = time.monotonic() + LAST_WORDS_S
        while self.poll(max(0, round(1000 * (deadline - time.monotonic())))):
            if isinstance(self.take(), messages.Close):
                break

    def report(self, stage: str, done: int, total: int | None) -> None:
        """A `rackmount_registry.checkpoint.Report`."""
        self.send(messages.Progress(stage, done, total))


class CoreLoop:
    """Takes messages between steps, and tells what each step brought."""

    def __init__(self, core: EngineCore, mail: Mail) -> None:
        self._core, self._mail = core, mail
        self._is_idle = True
        self._stats_due = 0.0

    def run(self) -> None:
        """Until `Close`. Raises what leaves no rank that could go on."""
        while self._take_mail():
            with self._surviving():
                self._is_idle = not self._core.step()
            self._tell_news()

    def _take_mail(self) -> bool:
        """Does what the messages ask for that have come; waits for one where there is no work."""
        while self._mail.poll(None if self._is_idle else 0):
            self._is_idle = False
            match self._mail.take():
                case messages.Add(requests):
                    for request in requests:
                        try:
                            self._core.add(request)
                        except RequestError:  # which the front end lets nobody ask
                            _log.exception("a request was refused")
                            lost = Event(request_id=request.request_id, finish_reason="error")
                            self._core.events.append(lost)
                case messages.Abort(request_ids):
                    for request_id in request_ids:
                        self._core.abort(request_id)
                case messages.ResetPrefixCache():
                    num_blocks = self._core.scheduler.reset_prefix_cache()
                    self._mail.send(messages.PrefixCacheReset(num_blocks))
                case messages.ReadExpertLoad():
                    with self._surviving():
                        self._core.settle()
                    self._mail.send(messages.ExpertLoads(self._core.expert_load()))
                case messages.Close():
                    return False
        return True

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Where the model raises, its requests end as "error", and others go on: but not on a
        device that has failed, or without ranks."""
        try:
            yield
        except (RankError, torch.AcceleratorError):
            raise
        except Exception:
            _log.exception("a step failed")

    def _tell_news(self) -> None:
        events, now, stats = list(self._core.events), time.monotonic(), None
        self._core.events.clear()
        if self._is_idle or now >= self._stats_due:
            stats, self._stats_due = self._core.stats, now + STATS_S
        if events or stats:
            self._mail.send(messages.Stepped(events, stats))


def _build(setup: RankSetup, mail: Mail) -> EngineCore:
    manager = PluginManager.discover()
    manager.prove(setup.manifest)
    path = Path(setup.path)
    with closing(open_model(path, manager, setup.config.load_format)) as checkpoint:
        with collector_paused():
            rack = draft_rack(setup.config, checkpoint.config, manager)
        live = Live(manager=manager, rack=rack, checkpoint=checkpoint, report=mail.report)
        core = EngineCore(path, live)
    mail.send(messages.Ready(core.limits, _describe(rack, core, manager)))
    return core


def _describe(rack: Rack, core: EngineCore, manager: PluginManager) -> dict[str, Any]:
    return {
        "model": rack.config.model,
        "dtype": dtype_name(rack.dtype),
        "device": str(rack.device),
        "num_ranks": rack.num_ranks,
        "max_model_len": rack.max_model_len,
        "block_size": rack.block_size,
        "num_kv_blocks": core.num_kv_blocks,
        "kv_bytes": core.kv_bytes,
        "weight_bytes_read": core.weight_bytes_read,
        "expert_layers": core.expert_layers,
        "parts": [as_plain(decision) for decision in decisions(rack, manager)],
        "report": startup_report(rack, core, manager),
    }
