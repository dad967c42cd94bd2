"""members.py: what needs no servers."""

from __future__ import annotations

import threading

from fastgen.rl.engine import RemoteEngine
from fastgen.rl.members import Member, of_each
from fastgen.rl.options import RemoteGeneratorOptions


def test_all_members_are_called_at_the_same_time() -> None:
    """Senders of an update wait for each other, however many engines there are."""
    engine = RemoteEngine("http://localhost:1", RemoteGeneratorOptions("http://localhost:1"))
    members = [Member(number, f"http://localhost:{number}", engine) for number in range(70)]
    together = threading.Barrier(len(members) + 1)

    def call(member: Member) -> int:
        together.wait(10)
        if member.number == 3:
            raise ValueError("no")
        return member.number

    def meanwhile() -> None:
        together.wait(10)

    found = of_each(members, call, meanwhile)
    assert isinstance(found.pop(members[3]), ValueError)
    assert list(found.values()) == [number for number in range(70) if number != 3]
