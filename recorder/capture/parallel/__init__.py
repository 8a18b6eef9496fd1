"""A rank's part of the model: flat parameters, aliases of DTensors, rank-local parameters, stages, groups."""
