"""Isolation on PostgreSQL: statements by which the server itself keeps tenants apart.

A tenant is a role. It gets rights on one schema and nothing else, and where tenants share a schema,
policies for the rows of its own namespaces. The server applies both to every connection of that role,
whatever code runs there. A session setting would not do: any code can change one.

This module only makes text: a script that an administrator can read before it runs. Names are quoted,
so that any name is safe. Running a script again changes nothing, and a later script for the same role
replaces what an earlier one granted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from limpet.errors import InvalidValue
from limpet.keys import check_namespace

NAME_BYTES_MAX: Final = 63
"""PostgreSQL truncates longer names, which could then refer to another role."""

# The rights that the engine needs, and no more. The tables are in the order in which a commit locks them. In another
# order, a writer and this script could wait for each other.
_TABLE_RIGHTS: Final = {
    "limpet_schema": "SELECT",
    "limpet_store": "SELECT",
    "limpet_namespaces": "SELECT, INSERT, UPDATE",
    "limpet_entries": "SELECT, INSERT, UPDATE, DELETE",
    "limpet_changes": "SELECT, INSERT, DELETE",
}
_NAMESPACED_TABLES: Final = ("limpet_namespaces", "limpet_entries", "limpet_changes")
_READ_FUNCTIONS: Final = ("limpet_now_ms",)
_WRITE_FUNCTIONS: Final = (
    "limpet_now_ms",
    "limpet_stored",
    "limpet_take",
    "limpet_notify",
    "limpet_revision",
    "limpet_time",
    "limpet_apply",
    "limpet_put",
    "limpet_put_one",
)
_FUNCTIONS: Final = (*_WRITE_FUNCTIONS, "limpet_refuse")


def grant_sql(
    role: str, *, schema: str, namespaces: Sequence[str] = (), read_only: bool = False, login: bool = False
) -> str:
    """The script that lets a role use the store in a schema.

    Args:
        role: The role. The script creates it if it does not exist.
        schema: The schema of the tables.
        namespaces: The namespaces of the schema that the role may use; all if none is given.
        read_only: Whether the role may only read.
        login: Whether the role may log in. If not given, an existing role keeps what it has.

    Raises:
        InvalidValue: A name that no role or schema can have.
        InvalidNamespace: A name that no namespace can have.
    """
    _check("role", role)
    _check("schema", schema)
    rights = dict.fromkeys(_TABLE_RIGHTS, "SELECT") if read_only else _TABLE_RIGHTS
    functions = _READ_FUNCTIONS if read_only else _WRITE_FUNCTIONS
    who, condition = _quoted(role), _condition(namespaces)
    return _script(
        ("Wait for running writers; new ones wait until this is done.", _lock(schema)),
        ("The role. It gets no password here.", *_create_role(role, login)),
        ("Refuse a role that no grant can restrict.", _refuse_privileged(role, schema)),
        ("Only roles with a grant use the store.", *_revoke_from_public(schema)),
        ("No role adds a function to the schema that every session searches.", _protect_public()),
        ("Take back what this role was granted before.", *_clear(role, schema)),
        (
            "The rights of the role.",
            f"GRANT USAGE ON SCHEMA {_quoted(schema)} TO {who};",
            *(f"GRANT {right} ON {_in(schema, table)} TO {who};" for table, right in rights.items()),
            *(f"GRANT EXECUTE ON FUNCTION {_in(schema, function)} TO {who};" for function in functions),
        ),
        (
            "The views. Since PostgreSQL 15 a view can apply the policies of the role that reads it.",
            _grant_views(role, schema, sees_all=not namespaces),
        ),
        (
            "The rows that the role may read and write.",
            *(
                f"CREATE POLICY {_quoted(_policy(role))} ON {_in(schema, table)} TO {who}"
                f" USING ({condition}) WITH CHECK ({condition});"
                for table in _NAMESPACED_TABLES
            ),
        ),
        *(
            [("No role sees a row without a policy, the owner included.", *_force_policies(schema))]
            if namespaces
            else []
        ),
    )


def revoke_sql(role: str, *, schema: str) -> str:
    """The script that takes from a role what `grant_sql` gave it. The role itself stays.

    Raises:
        InvalidValue: A name that no role or schema can have.
    """
    _check("role", role)
    _check("schema", schema)
    return _script(
        ("Wait for running writers; new ones wait until this is done.", _lock(schema)),
        ("Take back what this role was granted. The role and the grants of others stay.", *_clear(role, schema)),
    )


# The parts of a script --------------------------------------------------------


def _script(*parts: tuple[str, ...]) -> str:
    """One transaction of parts, each a comment and its statements."""
    # No comment contains a name: a name with a line break would end the comment.
    head = (
        "Grants for a Limpet store. Run it in psql, as a superuser or the owner of the tables.\n"
        "-- It is one transaction, and may be run again.",
        "BEGIN;",
        # The statements run with an administrator's rights, and so would a function that a tenant left in a searched
        # schema under the name of a function used here.
        "SET LOCAL search_path = pg_catalog, pg_temp;",
        "SET LOCAL lock_timeout = '5s';",
        "SET LOCAL client_min_messages = warning;",
    )
    texts = ["\n".join((f"-- {comment}", *statements)) for comment, *statements in (head, *parts)]
    return "\n\n".join((*texts, "COMMIT;")) + "\n"


def _lock(schema: str) -> str:
    return f"LOCK TABLE {_join_names(schema, _NAMESPACED_TABLES)} IN ACCESS EXCLUSIVE MODE;"


def _create_role(role: str, login: bool) -> list[str]:
    make = _block(f"""
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = {_literal(role)}) THEN
        CREATE ROLE {_quoted(role)} NOLOGIN;
    END IF;
""")
    return [make, f"ALTER ROLE {_quoted(role)} LOGIN;"] if login else [make]


def _refuse_privileged(role: str, schema: str) -> str:
    # A membership counts even if its rights are not inherited, because SET ROLE gives them.
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
            'CREATEROLE or a right to all data or files: no grant can restrict it', {_literal(role)}
            USING ERRCODE = 'invalid_grant_operation';
    END IF;
""")


def _revoke_from_public(schema: str) -> list[str]:
    return [
        # The schema public may hold the tables of others, which need their access.
        *([] if schema == "public" else [f"REVOKE ALL ON SCHEMA {_quoted(schema)} FROM PUBLIC;"]),
        f"REVOKE ALL ON {_join_names(schema, _TABLE_RIGHTS)} FROM PUBLIC;",
        f"REVOKE ALL ON FUNCTION {_join_names(schema, _FUNCTIONS)} FROM PUBLIC;",
    ]


def _protect_public() -> str:
    return _block("""
    IF to_regnamespace('public') IS NOT NULL AND has_schema_privilege('public', 'public', 'CREATE') THEN
        REVOKE CREATE ON SCHEMA public FROM PUBLIC;
    END IF;
""")


def _clear(role: str, schema: str) -> list[str]:
    who = _quoted(role)
    # Find its policies by the role: a policy keeps its name when the role is renamed.
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
        f"REVOKE ALL ON {_join_names(schema, _TABLE_RIGHTS)} FROM {who};",
        f"REVOKE ALL ON FUNCTION {_join_names(schema, _FUNCTIONS)} FROM {who};",
        _block(views_and_policies, "ours regclass", "policy name"),
    ]


def _grant_views(role: str, schema: str, *, sees_all: bool) -> str:
    """Grant the views, if they apply the policies of their reader or if the role ``sees_all`` rows anyway."""
    body = f"""
    FOR ours IN{_views(schema)}
    LOOP
        EXECUTE format('REVOKE ALL ON %s FROM PUBLIC', ours);
        IF applies_policies THEN
            EXECUTE format('ALTER VIEW %s SET (security_invoker = true)', ours);
        END IF;
        IF applies_policies OR {"true" if sees_all else "false"} THEN
            EXECUTE format('GRANT SELECT ON %s TO %I', ours, {_literal(role)});
        END IF;
    END LOOP;
"""
    applies_policies = "applies_policies boolean := current_setting('server_version_num')::int >= 150000"
    return _block(body, "ours regclass", applies_policies)


def _views(schema: str) -> str:
    """A query for our views. They are recognised by their trigger, because a foreign view may have the same name."""
    return f"""
        SELECT v.oid::regclass FROM pg_class v JOIN pg_trigger t ON t.tgrelid = v.oid AND t.tgname = 'limpet_refuse'
        WHERE v.relnamespace = {_literal(_quoted(schema))}::regnamespace AND v.relkind = 'v'"""  # noqa: S608 - quoted


def _force_policies(schema: str) -> list[str]:
    tables = ", ".join(_literal(_in(schema, table)) for table in _NAMESPACED_TABLES)
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
            for table in _NAMESPACED_TABLES
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
    # Quotes do not help: to GRANT, even "public" in quotes is the group of all roles.
    if name.startswith("pg_") or (what == "role" and name in ("public", "none")):
        raise InvalidValue(f"{what} {name!r} is reserved by PostgreSQL: choose another name")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _in(schema: str, name: str) -> str:
    return f"{_quoted(schema)}.{name}"


def _join_names(schema: str, names: Sequence[str] | dict[str, str]) -> str:
    return ", ".join(_in(schema, name) for name in names)


def _literal(text: str) -> str:
    quoted = "'" + text.replace("'", "''") + "'"
    # In a plain literal, the meaning of a backslash depends on a setting of the server.
    return "E" + quoted.replace("\\", "\\\\") if "\\" in text else quoted


def _block(body: str, *variables: str) -> str:
    """An anonymous block, for statements with conditions and loops."""
    declared = "DECLARE\n" + "".join(f"    {variable};\n" for variable in variables) if variables else ""
    text = f"\n{declared}BEGIN{body}END\n"
    # A name in the text may contain the tag that ends the block, so the tag is chosen last.
    tag = "$limpet$"
    while tag in text:
        tag = f"{tag[:-1]}_$"
    return f"DO {tag}{text}{tag};"
