"""What is left of a text before training."""

from paceline.train.data import Document, assistant, user
from zoo.clean import clean, clean_answer, join_wikitext


def test_worked_sums_read_as_people_write_them():
    assert clean_answer("He has 2*3 = <<2*3=6>>6 apples.\n#### 6") == "He has 2*3 = 6 apples.\nThe answer is 6."


def test_wikitext_is_joined_and_sentences_with_holes_go():
    text = ' The " Big Top " ( 24 in ) weighs 0 @.@ 7 kg , and it \'s well @-@ known . A <unk> is rare . Yes . '
    assert join_wikitext(text) == 'The "Big Top" (24 in) weighs 0.7 kg, and it\'s well-known. Yes.'


def test_boilerplate_is_kept_once_a_source():
    licence = "Permission is granted to anyone to use this text for any purpose, again and again."
    first, second = clean([Document("docs", text=f"One.\n\n{licence}"), Document("docs", text=f"Two.\n\n{licence}")])
    assert (first.text, second.text) == (f"One.\n\n{licence}", "Two.")
    assert [d.text for d in clean([Document("docs", text=licence)] * 2)] == [licence]


def test_headings_and_mark_up():
    text = "# Heading\n\n<Listing file-name='a'>\nlet a < b;\n</Listing>\n\n\n\nEnd"
    (document,) = clean([Document("docs", text=text)])
    assert document.text == "# Heading\n\nlet a < b;\n\nEnd"


def test_conversations_keep_their_turns():
    (document,) = clean([Document("x", messages=(user("<b>"), assistant("5 <<2+3=5>>\n#### 5")))])
    assert [m["content"] for m in document.messages] == ["<b>", "5 \nThe answer is 5."]
