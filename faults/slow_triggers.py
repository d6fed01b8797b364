"""Sleeps inside the product's own transactions, put there by triggers.

Beside history rows: now and then for longer than a lease, so that leases lapse while a batch is on its way. Behind
waits and keys: there whoever stores an event and whoever asks for it could miss each other. Behind a step's record:
between it and the commit its run must not pass on.
"""

from __future__ import annotations

from msgspec import Struct


class Delay(Struct, frozen=True):
    table: str
    when: str
    rarely: float
    """How often it takes longer than a lease."""
    often: float
    """How often it takes a moment."""

    @property
    def name(self) -> str:
        return f"faults_delay_{self.table}_{self.when.lower()}"

    def seconds(self, random: str) -> str:
        return (
            f"CASE WHEN {random} < {self.rarely} THEN 0.9 WHEN {random} < {self.often} THEN {random} * 0.03 ELSE 0 END"
        )


# One statement may write many rows, and MariaDB has triggers for rows only.
STATEMENTS = (
    Delay("history", "BEFORE", 0.01, 0.15),
    Delay("history", "AFTER", 0.01, 0.15),
    Delay("wait", "AFTER", 0.01, 0.5),
    Delay("event_key", "AFTER", 0.005, 0.5),
    Delay("step_commit", "AFTER", 0.01, 0.3),
)
ROWS = (
    Delay("history", "BEFORE", 0.003, 0.07),
    Delay("history", "AFTER", 0.003, 0.07),
    Delay("wait", "AFTER", 0.003, 0.2),
    Delay("event_key", "AFTER", 0.0005, 0.05),
    Delay("step_commit", "AFTER", 0.01, 0.3),
)


def _on_postgres(delay: Delay) -> tuple[str, str]:
    body = f"BEGIN PERFORM pg_sleep({delay.seconds('random()')}); RETURN NULL; END"
    on = f"{delay.when} INSERT ON edda_{delay.table} FOR EACH STATEMENT"
    return (
        f"CREATE FUNCTION {delay.name}() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$",
        f"CREATE TRIGGER {delay.name} {on} EXECUTE FUNCTION {delay.name}()",
    )


def _on_mysql(delay: Delay) -> str:
    on = f"{delay.when} INSERT ON edda_{delay.table} FOR EACH ROW"
    return f"CREATE TRIGGER {delay.name} {on} DO SLEEP({delay.seconds('RAND()')})"


SLOW_DOWN: dict[str, tuple[str, ...]] = {
    "postgres": tuple(statement for delay in STATEMENTS for statement in _on_postgres(delay)),
    "mysql": tuple(map(_on_mysql, ROWS)),
    "sqlite": (),  # a sleep there would only hold the one lock that everybody waits for; the probes nap instead
}
SPEED_UP: dict[str, tuple[str, ...]] = {
    "postgres": tuple(f"DROP FUNCTION {delay.name} CASCADE" for delay in STATEMENTS),
    "mysql": tuple(f"DROP TRIGGER {delay.name}" for delay in ROWS),
    "sqlite": (),
}
