"""What packages that transform, read or export a function make of ours."""
