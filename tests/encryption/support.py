"""Helpers of the encryption tests: keys, key files, and secrets that can be found again in any form."""

from __future__ import annotations

import base64
import os
import secrets
import string
from collections.abc import Iterable
from pathlib import Path

import limpet


def keyring(*ids: str, plain: bool = False) -> limpet.Keyring:
    """A keyring of new keys, the first of which is the current one."""
    return limpet.Keyring({name: os.urandom(32) for name in ids}, plain=plain)


def line(key_id: str, key: bytes) -> str:
    """A key as one line of a key file."""
    return f"{key_id}:{base64.b64encode(key).decode()}\n"


def replace_file(file: Path, text: str) -> None:
    """Replace a file at once, so that no reader sees half of it."""
    beside = file.with_name(f"{file.name}.new")
    beside.write_text(text)
    beside.replace(file)


class Secrets:
    """Random secrets that share a mark, by which any of them is found in whatever form it was stored."""

    def __init__(self) -> None:
        self._mark = "".join(secrets.choice(string.ascii_letters) for _ in range(12))
        # Numbers differ in their last five digits and in the last two of their eight bytes.
        step = 10**5 * 2**16
        self._base = (2**61 + secrets.randbits(61)) // step * step
        self._numbers = 0

    def text(self) -> str:
        return self._mark + secrets.token_hex(8)

    def number(self) -> int:
        self._numbers += 1
        return self._base + self._numbers

    def traces(self) -> dict[str, bytes]:
        """The bytes by which a secret is found, for each form in which a file may hold it."""
        mark = self._mark.encode()
        digits = str(self._base)[:-5].encode()
        found = {"text": mark, "hex": mark.hex().encode(), "HEX": mark.hex().upper().encode(), "digits": digits}
        found["hex of digits"] = digits.hex().encode()
        for shift in range(3):
            # Base64 has three forms, by the offset of the text; the ends depend on the neighbouring bytes.
            found[f"base64 {shift}"] = base64.b64encode(b"\0" * shift + mark)[4 if shift else 0 : -4]
        found["number"] = self._base.to_bytes(8, "big")[:6]
        found["number, little-endian"] = self._base.to_bytes(8, "little")[2:]
        return found

    def found_in(self, contents: Iterable[bytes]) -> set[str]:
        """The forms in which secrets are found."""
        traces = self.traces()
        return {name for content in contents for name, trace in traces.items() if trace in content}


def files_under(folder: Path) -> list[bytes]:
    """The contents of all files in a folder."""
    return [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
