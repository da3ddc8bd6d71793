"""What workers have counted, as their parent hears of it: the newest, whatever the order of the answers."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

from gateway.crew.channel import Answering, Asking
from gateway.crew.member import Counted, State
from gateway.crew.together import Together, decode
from gateway.telemetry.series import Families, Family, Point
from tests.support.serving import make

NAME = "dualgauge_requests"


def counted(value: float) -> Families:
    return [Family(NAME, "counter", "text", [Point(f"{NAME}_total", (), value)])]


class Asked:
    """A worker as its parent sees it, without a process."""

    number = 0
    state: State = "serving"
    pid = 1

    def __init__(self) -> None:
        self.seen = Counted()
        self.cursor = ""
        self.rows: dict[str, tuple[bytes, bool]] = {}
        self.asking: Asking

    async def ask(self, what: str, *arguments: object, seconds: float = 5.0) -> bytes:
        return await self.asking.ask(what, *arguments)


async def test_what_a_worker_tells_at_its_end_is_not_replaced_by_an_earlier_answer(tmp_path: Path) -> None:
    """Both arrive together, and whoever has asked goes on only after the other was heard."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    member = Asked()
    member.asking = Asking(reader, writer, lambda _, body: member.seen.end(decode(body, type=Families)))
    config = make(tmp_path, {"fast": "http://127.0.0.1:9"}).config
    together = Together(config, [member], clock=time.monotonic, wall=time.time, name="test")
    there, back = await asyncio.open_connection(sock=theirs)

    async def answer(what: str, arguments: list[object]) -> bytes:
        channel.tell("metrics", counted(7))
        return b'[["dualgauge_requests", "counter", "text", [["dualgauge_requests_total", [], 5.0]]]]'

    channel = Answering(there, back, answer)
    running = [asyncio.create_task(channel.run()), asyncio.create_task(member.asking.run())]
    await together._look()
    assert member.seen.families == counted(7)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await channel.close()


def test_an_answer_to_an_earlier_question_is_not_the_newest() -> None:
    one = Counted()
    first, second = one.ask(), one.ask()
    one.answer(second, counted(2))
    one.answer(first, counted(1))
    assert one.families == counted(2)
    one.answer(one.ask(), counted(3))
    assert one.families == counted(3)
    one.end(counted(4))
    one.answer(one.ask(), counted(3))
    assert one.families == counted(4)
