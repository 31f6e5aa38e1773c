"""The page: `layout.build` makes it, `component.race_view` is the one component that draws."""
