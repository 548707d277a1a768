"""24 fixed prompts for the model card, four of each of six kinds."""

HARBOUR = (
    "The old harbour of Fallmouth was closed in 1974 after a storm destroyed its wall. For thirty years the buildings "
    "stood empty. In 2005 a group of artists moved in and opened workshops. Today the harbour has forty shops, a small "
    "theatre and a boat museum, and it is visited by two hundred thousand people a year."
)
BEES = (
    "Honey bees live in colonies of up to sixty thousand workers. Each colony has one queen, who can lay two thousand "
    "eggs a day. Workers tell each other where to find flowers by dancing: the angle of the dance shows the direction, "
    "and its length shows the distance."
)
TRAIN = (
    "The night train from Lindau leaves at 21:40 from platform 6. Passengers can board from 21:10. Bicycles must be "
    "booked in advance. The train arrives in Hamburg at 7:55, and breakfast is served from 6:30 in the dining car."
)
GLASS = (
    "Window glass is made from sand, soda ash and limestone. The mixture is melted at about 1500 degrees and poured "
    "onto a bath of liquid tin, where it spreads into a flat sheet. The method was developed by Alastair Pilkington in "
    "the 1950s and is used for nearly all windows today."
)
LISTING = (
    "[1] The mill of Greyford was built in 1790. It is known for its wooden wheel.\n"
    "[2] The library of Ostwick was designed by Nora Feldmann. It opens at 9 in the morning.\n"
    "[3] The castle of Brandon is made of white marble. About 5200 people visit it every month."
)
PASSAGES = (
    "Passage 1: Amber is the hardened resin of ancient trees. Most of it is found near the Baltic Sea.\n"
    "Passage 2: Coral is built by tiny animals in warm seas. The largest reef lies off Australia.\n"
    "Passage 3: Cork is the bark of an oak that grows in Portugal. It is harvested every nine years."
)

PROMPTS: dict[str, list[str]] = {
    "chat": [
        "Hello! What can you do for me?",
        "I would like to book a table at a restaurant in San Jose for two people.",
        "Give me three tips for sleeping better.",
        "What is the weather like in the mountains in winter?",
    ],
    "translation": [
        "Translate German to English: Die alte Frau kauft einen roten Apfel auf dem Markt.",
        "Translate German to English: Gestern suchte der Lehrer seinen Schlüssel im Garten.",
        "Translate German to English: Das Fenster ist groß und neu. Wo ist meine Tasche?",
        "Translate German to English: Mein Bruder kann das Fahrrad heute nicht verkaufen.",
    ],
    "summary": [
        f"Summarize: {HARBOUR}",
        f"Summarize: {BEES}",
        f"Summarize: {TRAIN}",
        f"{GLASS}\n\nSummarize the text.",
    ],
    "question": [
        f"{TRAIN}\n\nWhen does the train arrive in Hamburg?",
        f"{BEES}\n\nHow many eggs can the queen lay in a day?",
        f"Passage: {GLASS}\n\nQuestion: Who developed the method?",
        f"Why was the harbour closed?\n\n{HARBOUR}",
    ],
    "arithmetic": [
        "What is 47 + 38?",
        "Calculate 9 * 7.",
        "Mia has 24 shells. Her brother gives her 13 more. How many shells does Mia have now?",
        "A farmer packs 8 boxes with 6 eggs each. How many eggs does he pack?",
    ],
    "retrieval": [
        f"{LISTING}\n\nAnswer from the passages: Who designed the library of Ostwick?",
        f"{LISTING}\n\nName the passage, then answer: What is the castle of Brandon made of?",
        f"{PASSAGES}\n\nAnswer from the passages: How often is cork harvested?",
        f"Answer from the passages: Where is most amber found?\n\n{PASSAGES}",
    ],
}
