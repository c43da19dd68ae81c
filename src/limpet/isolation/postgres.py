"""Walls on PostgreSQL: the statements by which the server itself keeps tenants apart.

The wall is a role. It gets rights on one schema and on nothing else, and where tenants share a
schema, policies for the rows of its namespaces and of no others. Whoever connects as that role
meets the wall, whatever code runs there; a setting of a session would be no credential.

This is text only: a script that an administrator can read before it runs. Names are quoted, so
that any name is a name. Running a script again leaves things as they are, and a later one for the
same role replaces what an earlier one granted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from limpet.errors import InvalidValue
from limpet.keys import check_namespace

NAME_BYTES_MAX: Final = 63
"""PostgreSQL cuts a longer name off, and would then speak of somebody else."""

# What the engine needs, and no more. The tables stand in the order in which a commit comes to them:
# taken in another order, a writer and this script could wait for each other.
_WRITES: Final = {
    "limpet_schema": "SELECT",
    "limpet_store": "SELECT",
    "limpet_namespaces": "SELECT, INSERT, UPDATE",
    "limpet_entries": "SELECT, INSERT, UPDATE, DELETE",
    "limpet_changes": "SELECT, INSERT, DELETE",
}
_NAMESPACED: Final = ("limpet_namespaces", "limpet_entries", "limpet_changes")
_READING: Final = ("limpet_now_ms",)
_WRITING: Final = (
    "limpet_now_ms",
    "limpet_stored",
    "limpet_take",
    "limpet_hold",
    "limpet_apply",
    "limpet_put",
    "limpet_put_one",
    "limpet_commit",
)
_FUNCTIONS: Final = (*_WRITING, "limpet_refuse")


def granting(
    role: str, *, schema: str, namespaces: Sequence[str] = (), read_only: bool = False, login: bool = False
) -> str:
    """The script that lets a role use the store in a schema.

    Args:
        role: Who. It is made if there is no such role.
        schema: Where the tables are.
        namespaces: What it may use of the schema. None given means all.
        read_only: Whether it may only read.
        login: Whether it may log in. Without, a role that is there already stays as it is.

    Raises:
        InvalidValue: A name that no role or schema can have.
        InvalidNamespace: A name that no namespace can have.
    """
    _check("role", role)
    _check("schema", schema)
    rights = dict.fromkeys(_WRITES, "SELECT") if read_only else _WRITES
    functions = _READING if read_only else _WRITING
    who, condition = _quoted(role), _condition(namespaces)
    return _script(
        ("Whoever writes is waited for, and then waits until this is done.", _lock(schema)),
        ("The role. It gets no password here.", *_role(role, login)),
        ("No grant holds back whoever stands above grants.", _refuse_those_above(role, schema)),
        ("Nobody uses the store unasked.", *_close(schema)),
        ("Nobody leaves a function in a schema where everybody looks for functions.", _close_public()),
        ("What this role was granted before.", *_clear(role, schema)),
        (
            "What it may do.",
            f"GRANT USAGE ON SCHEMA {_quoted(schema)} TO {who};",
            *(f"GRANT {right} ON {_in(schema, table)} TO {who};" for table, right in rights.items()),
            *(f"GRANT EXECUTE ON FUNCTION {_in(schema, function)} TO {who};" for function in functions),
        ),
        (
            "The views. Since PostgreSQL 15 they can show their readers what these may see, and nothing else.",
            _grant_views(role, schema, anyway=not namespaces),
        ),
        (
            "The rows that it may see and leave.",
            *(
                f"CREATE POLICY {_quoted(_policy(role))} ON {_in(schema, table)} TO {who}"
                f" USING ({condition}) WITH CHECK ({condition});"
                for table in _NAMESPACED
            ),
        ),
        *([("Nobody sees a row without a policy, the owner included.", *_wall(schema))] if namespaces else []),
    )


def revoking(role: str, *, schema: str) -> str:
    """The script that takes from a role what `granting` gave it. The role itself stays.

    Raises:
        InvalidValue: A name that no role or schema can have.
    """
    _check("role", role)
    _check("schema", schema)
    return _script(
        ("Whoever writes is waited for, and then waits until this is done.", _lock(schema)),
        ("What this role was granted. The role stays, and so does what others were granted.", *_clear(role, schema)),
    )


# The parts of a script --------------------------------------------------------


def _script(*parts: tuple[str, ...]) -> str:
    """Parts of a comment and statements as one transaction."""
    # No comment holds a name: one with a line break in it would end the comment.
    head = (
        "Grants for a store of Limpet, for psql, as a superuser or the owner of the tables.\n"
        "-- They happen together or not at all, and may be repeated.",
        "BEGIN;",
        # The statements run with an administrator's rights. A function of the same name as one of
        # theirs, left in a schema that is searched, would too.
        "SET LOCAL search_path = pg_catalog, pg_temp;",
        "SET LOCAL lock_timeout = '5s';",
        "SET LOCAL client_min_messages = warning;",
    )
    texts = ["\n".join((f"-- {comment}", *statements)) for comment, *statements in (head, *parts)]
    return "\n\n".join((*texts, "COMMIT;")) + "\n"


def _lock(schema: str) -> str:
    return f"LOCK TABLE {_listed(schema, _NAMESPACED)} IN ACCESS EXCLUSIVE MODE;"


def _role(role: str, login: bool) -> list[str]:
    make = _block(f"""
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = {_literal(role)}) THEN
        CREATE ROLE {_quoted(role)} NOLOGIN;
    END IF;
""")
    return [make, f"ALTER ROLE {_quoted(role)} LOGIN;"] if login else [make]


def _refuse_those_above(role: str, schema: str) -> str:
    # Membership counts also where its rights are not inherited: SET ROLE is enough.
    return _block(f"""
    IF EXISTS (
        SELECT FROM pg_roles r, pg_class t
        WHERE t.oid = {_literal(_in(schema, "limpet_store"))}::regclass
        AND pg_has_role({_literal(role)}::name, r.oid, 'MEMBER')
        AND (r.oid = t.relowner OR r.rolsuper OR r.rolbypassrls OR r.rolcreaterole OR r.rolname IN (
            'pg_read_all_data', 'pg_write_all_data',
            'pg_read_server_files', 'pg_write_server_files', 'pg_execute_server_program'))
    ) THEN
        RAISE EXCEPTION 'role % is, or is a member of, the owner of the tables or a role with SUPERUSER, BYPASSRLS, '
            'CREATEROLE or a right to all data or files: no grant can hold it back', {_literal(role)}
            USING ERRCODE = 'invalid_grant_operation';
    END IF;
""")


def _close(schema: str) -> list[str]:
    return [
        # What else there is in the schema public is not ours, and others may need to come to it.
        *([] if schema == "public" else [f"REVOKE ALL ON SCHEMA {_quoted(schema)} FROM PUBLIC;"]),
        f"REVOKE ALL ON {_listed(schema, _WRITES)} FROM PUBLIC;",
        f"REVOKE ALL ON FUNCTION {_listed(schema, _FUNCTIONS)} FROM PUBLIC;",
    ]


def _close_public() -> str:
    return _block("""
    IF to_regnamespace('public') IS NOT NULL AND has_schema_privilege('public', 'public', 'CREATE') THEN
        REVOKE CREATE ON SCHEMA public FROM PUBLIC;
    END IF;
""")


def _clear(role: str, schema: str) -> list[str]:
    who = _quoted(role)
    # Its policies are found by the role and not by their name, which stays when a role is renamed.
    views_and_policies = f"""
    FOR ours IN{_views(schema)}
    LOOP
        EXECUTE format('REVOKE ALL ON %s FROM %I', ours, {_literal(role)});
    END LOOP;
    FOR policy, ours IN
        SELECT p.polname, p.polrelid::regclass FROM pg_policy p
        JOIN pg_class t ON t.oid = p.polrelid AND t.relnamespace = {_literal(_quoted(schema))}::regnamespace
        WHERE starts_with(p.polname, 'limpet_') AND p.polname <> 'limpet_owner'
        AND p.polroles = ARRAY[{_literal(who)}::regrole::oid]
    LOOP
        EXECUTE format('DROP POLICY %I ON %s', policy, ours);
    END LOOP;
"""  # noqa: S608 - names are quoted
    return [
        f"REVOKE ALL ON SCHEMA {_quoted(schema)} FROM {who};",
        f"REVOKE ALL ON {_listed(schema, _WRITES)} FROM {who};",
        f"REVOKE ALL ON FUNCTION {_listed(schema, _FUNCTIONS)} FROM {who};",
        _block(views_and_policies, "ours regclass", "policy name"),
    ]


def _grant_views(role: str, schema: str, *, anyway: bool) -> str:
    """The views; ``anyway`` if the role may see every row, so that it does not matter with whose eyes they look."""
    body = f"""
    FOR ours IN{_views(schema)}
    LOOP
        EXECUTE format('REVOKE ALL ON %s FROM PUBLIC', ours);
        IF is_able THEN
            EXECUTE format('ALTER VIEW %s SET (security_invoker = true)', ours);
        END IF;
        IF is_able OR {"true" if anyway else "false"} THEN
            EXECUTE format('GRANT SELECT ON %s TO %I', ours, {_literal(role)});
        END IF;
    END LOOP;
"""
    is_able = "is_able boolean := current_setting('server_version_num')::int >= 150000"
    return _block(body, "ours regclass", is_able)


def _views(schema: str) -> str:
    """A query for our views, which are known by their trigger: the names may be somebody else's."""
    return f"""
        SELECT v.oid::regclass FROM pg_class v JOIN pg_trigger t ON t.tgrelid = v.oid AND t.tgname = 'limpet_refuse'
        WHERE v.relnamespace = {_literal(_quoted(schema))}::regnamespace AND v.relkind = 'v'"""  # noqa: S608 - quoted


def _wall(schema: str) -> list[str]:
    tables = ", ".join(_literal(_in(schema, table)) for table in _NAMESPACED)
    body = f"""
    FOR ours, owner IN
        SELECT oid::regclass, relowner::regrole FROM pg_class
        WHERE oid = ANY (ARRAY[{tables}]::regclass[])
    LOOP
        EXECUTE format('DROP POLICY IF EXISTS limpet_owner ON %s', ours);
        EXECUTE format('CREATE POLICY limpet_owner ON %s TO %s USING (true) WITH CHECK (true)', ours, owner);
    END LOOP;
"""  # noqa: S608 - names are quoted
    return [
        _block(body, "ours regclass", "owner regrole"),
        *(
            f"ALTER TABLE {_in(schema, table)} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;"
            for table in _NAMESPACED
        ),
    ]


def _condition(namespaces: Sequence[str]) -> str:
    if not namespaces:
        return "true"
    names = sorted({check_namespace(name) for name in namespaces})
    return f"namespace IN ({', '.join(map(_literal, names))})"


def _policy(role: str) -> str:
    name = f"limpet_role_{role}"
    if len(name.encode()) <= NAME_BYTES_MAX:
        return name
    return f"limpet_hash_{hashlib.sha256(role.encode()).hexdigest()[:32]}"


# Names ------------------------------------------------------------------------


def _check(what: str, name: str) -> None:
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidValue(f"{what} {name!r} is not UTF-8") from None
    if not 1 <= size_bytes <= NAME_BYTES_MAX or "\0" in name:
        raise InvalidValue(
            f"{what} {name!r} has {size_bytes} bytes; PostgreSQL allows 1 to {NAME_BYTES_MAX} without U+0000"
        )
    # Quotes do not help: even "public" in quotes is everybody to GRANT.
    if name.startswith("pg_") or (what == "role" and name in ("public", "none")):
        raise InvalidValue(f"{what} {name!r} is a name that PostgreSQL keeps for itself: choose another")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _in(schema: str, name: str) -> str:
    return f"{_quoted(schema)}.{name}"


def _listed(schema: str, names: Sequence[str] | dict[str, str]) -> str:
    return ", ".join(_in(schema, name) for name in names)


def _literal(text: str) -> str:
    quoted = "'" + text.replace("'", "''") + "'"
    # What a backslash means in a plain literal is up to a setting of the server.
    return "E" + quoted.replace("\\", "\\\\") if "\\" in text else quoted


def _block(body: str, *variables: str) -> str:
    """Statements that look before they act."""
    declared = "DECLARE\n" + "".join(f"    {variable};\n" for variable in variables) if variables else ""
    text = f"\n{declared}BEGIN{body}END\n"
    # A name may hold whatever ends the block, so that is chosen last.
    tag = "$limpet$"
    while tag in text:
        tag = f"{tag[:-1]}_$"
    return f"DO {tag}{text}{tag};"
