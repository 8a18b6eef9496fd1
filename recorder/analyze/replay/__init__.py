"""`recorder replay`: one recorded call of a module as a folder that runs alone, and an audit of all calls of a step."""
