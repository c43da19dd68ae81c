"""What an attacker can do to a trail who can write the database."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path
from typing import Any


def replace(file: Path, content: bytes) -> None:
    """Put a database in the place of another, with what that left beside it."""
    file.write_bytes(content)
    for beside in file.parent.glob(f"{file.name}-*"):
        beside.unlink()


def rows_in(database: sqlite3.Connection) -> list[tuple[str, str]]:
    found = database.execute("SELECT key, value FROM limpet_entries WHERE family = 'audit' ORDER BY key").fetchall()
    return [(_text(key), _text(value)) for key, value in found]


def _text(column: Any) -> str:
    return column.decode() if isinstance(column, bytes) else str(column)


def tamper(database: sqlite3.Connection, dice: random.Random) -> str:
    """Change something of the trail, as an attacker might who can write the database. Returns what was done."""
    rows = rows_in(database)
    key, value = dice.choice(rows)
    update = "UPDATE limpet_entries SET value = ? WHERE family = 'audit' AND CAST(key AS TEXT) = ?"
    match dice.choice(["remove", "edit", "swap", "copy", "rename", "byte"]):
        case "remove":
            gone = {key}
            if dice.random() < 0.3:
                # All of a key that is not sealed, or the end of the chain.
                root = key.split("/")[0]
                gone = {name for name, _ in rows if name.startswith(root) and name >= key}
            for name in gone:
                database.execute("DELETE FROM limpet_entries WHERE family = 'audit' AND CAST(key AS TEXT) = ?", (name,))
            return f"removed {sorted(gone)[0]} and {len(gone) - 1} more"
        case "edit":
            document = json.loads(value)
            place = document["row"] if "row" in document and isinstance(document["row"], dict) else document
            name = dice.choice(sorted(place))
            old = place[name]
            place[name] = {
                str: lambda: old[:-1] + ("0" if old[-1:] != "0" else "1"),
                int: lambda: old + dice.choice([1, -1]),
                dict: lambda: {**old, "purpose": "cursor", "x": 1},
                type(None): lambda: "x",
            }[type(old)]()
            database.execute(update, (json.dumps(document, separators=(",", ":"), sort_keys=True), key))
            return f"edited {name} of {key}"
        case "swap":
            other, its = dice.choice([row for row in rows if row[1] != value])
            database.execute(update, (its, key))
            database.execute(update, (value, other))
            return f"swapped {key} and {other}"
        case "copy":
            other, its = dice.choice([row for row in rows if row[1] != value])
            database.execute(update, (its, key))
            return f"put {other} in the place of {key}"
        case "rename":
            database.execute(
                "UPDATE limpet_entries SET key = ? WHERE family = 'audit' AND CAST(key AS TEXT) = ?", (f"{key}0", key)
            )
            return f"renamed {key}"
        case _:
            at = dice.randrange(len(value))
            letter = dice.choice([one for one in '0aZ"}' if one != value[at]])
            database.execute(update, (value[:at] + letter + value[at + 1 :], key))
            return f"changed letter {at} of {key}"
