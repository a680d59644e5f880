"""The planner: owns the plan and its epoch, and asks the ladder which lever to pull."""
