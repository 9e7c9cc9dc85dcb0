"""OpenAI's `service_tier` and our service classes: which class a request has, and what its answer says.

The class is the API key's, if there is a table of keys; else the tier's; else the default. With a table no client can
choose: what it asks for is ignored. Not here: what a class means (`engine.classes`).
"""

from __future__ import annotations

from coterie.engine.config import ServiceConfig
from coterie.engine.messages import ServiceClass
from coterie.server.errors import bad_request

CLASS_OF_TIER: dict[str, ServiceClass] = {"priority": "gold", "default": "silver", "flex": "bronze"}
TIER_OF_CLASS: dict[ServiceClass, str] = {name: tier for tier, name in CLASS_OF_TIER.items()}


def service_class(tier: str | None, of_key: ServiceClass | None, service: ServiceConfig) -> ServiceClass | None:
    """The class of a request; None if the server has none. `of_key`: the class that the client's key is bound to.

    Raises a 400 for a tier that does not exist.
    """
    if tier not in (None, "auto") and tier not in CLASS_OF_TIER:
        shown = ", ".join(f'"{name}"' for name in ("auto", *CLASS_OF_TIER))
        raise bad_request(f"service_tier: {tier[:64]!r} is unknown; use one of {shown}", param="service_tier")
    if not service.enabled:
        return None
    return of_key or CLASS_OF_TIER.get(tier or "auto", service.default_class)
