"""Curation: which trajectories a dataset is made of, by a plan that can be repeated.

    from orchard.data.curation import Curation, curate, filters, selectors

    curation = Curation(steps=(filters.outcome("resolved"), filters.max_tokens(65_536), selectors.random(500)), seed=7)
    chosen = curate(source, curation)

The same in YAML is read by `orchard.data.curation.plan.load_plan`.
"""

from orchard.data.curation import filters, selectors
from orchard.data.curation.pipeline import Chosen, Curation, Fate, StepReport, curate

__all__ = ["Chosen", "Curation", "Fate", "StepReport", "curate", "filters", "selectors"]
