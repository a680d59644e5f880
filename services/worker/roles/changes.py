"""The kinds of changes that a worker takes part in: one line each.

To add one: a step in the union of `shared.messages.plan`, a file in `steps/`, a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from services.worker.roles.role_keeper import RoleKeeper
from services.worker.roles.steps.change import Change
from services.worker.roles.steps.form import Form
from services.worker.roles.steps.load import LoadChange
from services.worker.roles.steps.restore import Restore
from services.worker.roles.steps.unload import Unload
from shared.messages.plan import FormGroup, LoadBeside, PlanStep, RestoreInstance, UnloadBeside

Changes = Mapping[type[PlanStep], Callable[[Any, RoleKeeper], Change]]
"""By the type of a step: what makes the change for one."""
CHANGES: Final[Changes] = {
    FormGroup: Form,
    LoadBeside: LoadChange,
    UnloadBeside: Unload,
    RestoreInstance: Restore,
}
