"""One folder per operator, with the same file names in each.

`api` the public functions and the custom_vjp; `spec` options and residuals; `reference` the
definition; `forward` and `backward` the portable implementation; `cases` the named inputs that tests,
`check` and benchmarks read.
"""
