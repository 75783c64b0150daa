"""How a run is made to fit into its GPUs: what it takes, estimated and purely, and the plan that takes few enough."""
