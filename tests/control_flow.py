"""The control-flow graph of a kernel in PTX whose groups of warps have different tasks (`gl.warp_specialize`).

Versions of Triton order the basic blocks of a kernel differently, merge equal ones, and choose a task by a jump table
or by comparisons. Tests of compiled kernels therefore ask which code a group of warps can reach, and rely on the order
of the text only within one group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

BARRIER = r"barrier\.sync\s+1;\s*\n"
"""The barrier of all threads, before and after which groups of warps begin and end their tasks."""


def instructions(code: str) -> list[str]:
    """Return the instructions of PTX, without labels, directives and comments."""
    return re.findall(r"^\s+([@a-z][^\n]*;)", code, re.MULTILINE)


class ControlFlow:
    """The basic blocks of a kernel. A block is identified by its label.

    code: {label: text of the block}, in the order of the text; the kernel begins with the block ENTRY.
    following: {label: labels of the blocks that may run next}.
    dispatch: label of the block in which all warps but the first group learn their next task.
    first, others: labels of the blocks that the first group of warps can reach, and those that other warps can reach
        from `dispatch` on. Both include the block that ends the kernel.
    """

    ENTRY = "entry"

    def __init__(self, ptx: str) -> None:
        body = ptx[: ptx.index("$L__func_end0:")]
        # The tables of jumps, which are next to them or (Triton 3.9) at the beginning of the kernel.
        tables = dict(re.findall(r"(\S+):\s*\.branchtargets([^;]*);", body))
        body = re.sub(r"\S+:\s*\.branchtargets[^;]*;", "", body)
        # LLVM writes a comment instead of a label before a block that only its predecessor in the text leads to.
        pieces = re.split(r"^(\$L__BB\d+_\d+|// %bb\.\d+):", body, flags=re.MULTILINE)
        self.code = dict(zip([self.ENTRY, *pieces[1::2]], pieces[::2], strict=True))
        self.following = dict[str, list[str]]()
        labels = [*self.code]
        for label, after in zip(labels, [*labels[1:], ""], strict=True):
            jumps = [tables[name] for name in re.findall(r"brx\.idx\s+\S+, (\S+);", self.code[label])]
            self.following[label] = re.findall(r"\$L__BB\d+_\d+", self.code[label] + "".join(jumps))
            last = instructions(self.code[label])[-1:]
            if not last or not re.match(r"bra\.uni|brx\.idx|ret", last[0]):
                self.following[label].append(after)
        [self.dispatch] = self.matching(rf"{BARRIER}(?:(?!\s*barrier)[^\n]*\n)*?\s*ld\.shared\.b8")
        self.first = self.reached(self.ENTRY, without=[self.dispatch])
        self.others = self.reached(self.dispatch)
        assert instructions(self.text(self.first & self.others)) == ["ret;"], "otherwise the groups share code"

    def matching(self, pattern: str) -> set[str]:
        """Return the labels of the blocks in which a regular expression matches."""
        return {label for label, code in self.code.items() if re.search(pattern, code)}

    def reached(self, start: str, without: Iterable[str] = ()) -> set[str]:
        """Return the labels of the blocks that can run from the block `start` on, on paths that avoid some blocks."""
        found, left, avoided = set[str](), [start], {*without}
        while left:
            label = left.pop()
            if label not in found | avoided:
                found.add(label)
                left += self.following[label]
        return found

    def text(self, labels: set[str]) -> str:
        """Return the code of some blocks, in the order of the text."""
        return "".join(code for label, code in self.code.items() if label in labels)

    def taken_over(self) -> str:
        """Return the code that other warps run after they have read which task is next, up to the next barrier."""
        start = self.code[self.dispatch].split("ld.shared.b8", 1)[1]
        found, left = {self.dispatch: re.split(BARRIER, start)}, [self.dispatch]
        while left:
            label = left.pop()
            if len(found[label]) == 1:  # there is no barrier in this block
                new = [each for each in self.following[label] if each not in found]
                found |= {each: re.split(BARRIER, self.code[each]) for each in new}
                left += new
        return "".join(pieces[0] for pieces in found.values())
