"""`recorder replay`: writes a recorded call of a module as a folder that runs alone, or audits all calls of a step."""
