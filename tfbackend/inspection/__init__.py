"""`tfbackend inspect`: what would become of a model, before a GPU, a weight or vLLM is needed.

    target.py   MODEL -> config and headers          layout.py   shares of each parameter, exchanges between ranks
    headers.py  safetensors headers                  memory.py   weights, KV cache and longest context, as vLLM counts
    classes.py  the serving class and its MRO        accounts.py the ledger, from headers alone
    tree.py     the module tree, folded              verdict.py  problems, losses and the exit status
    diffs.py    forwards before and after            examine.py  joins them: inspect_model(Request) -> Inspection

    facts.py    figures as sentences                 screen.py   on the terminal (rich)
    document.py as JSON                              page.py     as one page (jinja2)

Nothing here imports vLLM. Whatever its source says of vLLM's own arithmetic, tests/inspection compares with vLLM.
"""
