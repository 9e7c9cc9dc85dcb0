def derived(row):
    from coterie.spec.errors import SpecError
    raise SpecError("not yet")
