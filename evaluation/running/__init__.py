"""Answer questions: jobs in turns (`scheduling`), one run (`runner`), a question (`answering`)."""
