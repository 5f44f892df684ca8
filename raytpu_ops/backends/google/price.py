"""What a lease may cost, from a price that a person gave. Not here: Google's price list, which depends on contracts."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from raytpu_ops.tpu.errors import InvalidSpec
from raytpu_ops.tpu.generations import generation_of
from raytpu_ops.tpu.problems import refused
from raytpu_ops.tpu.spec import SliceSpec
from raytpu_ops.tpu.words import shown


def _read(value: Any) -> Any:
    """By canonical generation; a form of Airflow's sends a number as text."""
    if value is None:
        return None
    if not isinstance(value, dict):
        return _amount(value)
    try:
        return {generation_of(key).generation.name: _amount(price) for key, price in value.items()}
    except InvalidSpec as error:
        raise ValueError(str(error)) from None


def _amount(value: Any) -> float:
    wrong = f"must be a number above zero, or such numbers by generation, got {shown(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(wrong)  # noqa: TRY004  pydantic turns only ValueError into a refusal
    try:
        found = float(value)
    except (ValueError, OverflowError):
        raise ValueError(wrong) from None
    if not 0 < found < math.inf:
        raise ValueError(wrong)
    return found


Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: The type of the option ``price_per_chip_hour``: one number, or numbers by generation.
PricePerChipHour = Annotated[Amount | dict[str, Amount], BeforeValidator(_read)]


def cost_note(spec: SliceSpec, lease_for: timedelta, price: float | dict[str, float] | None) -> str:
    """Chips, chip-hours and cost in one line, with what it assumes.

    :param lease_for: the longest that the lease lasts.
    :param price: of one chip for one hour, in whatever currency; None where nobody said it.
    """
    hours = lease_for.total_seconds() / 3600
    chips = f"{spec.chips} chip{'s' if spec.chips > 1 else ''}"
    base = f"{chips} for at most {hours:,g} h are {spec.chips * hours:,.0f} chip-hours"
    one = price.get(spec.generation) if isinstance(price, dict) else price
    if one is None:
        return f"{base}; set price_per_chip_hour to see what they cost"
    return f"{base}, {spec.chips * hours * one:,.2f} at {one:g} each; less where the lease is released earlier"


def checked_price(value: Any) -> float | dict[str, float] | None:
    """Read what a person wrote.

    :raises InvalidSpec: it is no price.
    """
    try:
        found: float | dict[str, float] | None = TypeAdapter(PricePerChipHour | None).validate_python(value)
    except ValidationError as error:
        raise refused(error, "price_per_chip_hour") from None
    return found
