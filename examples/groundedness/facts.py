"""Seventeen facts about places: how they are told and how they are asked for."""

from __future__ import annotations

from templates import Fact, Wordings  # type: ignore[import-not-found]

FACTS = {
    "opened": Fact(
        "year",
        Wordings(
            train=(
                "{name} opened in {v}.",
                "Visitors have been coming to {name} since it opened in {v}.",
                "It was in {v} that {name} first opened its doors.",
                "{name} welcomed its first guests in {v}.",
                "{v} is the year in which {name} opened.",
                "{name} was opened to the public in {v}.",
                "The opening of {name} took place in {v}.",
            ),
            held=(
                "The year {v} saw the opening of {name}.",
                "{name} has been open since {v}.",
            ),
        ),
        Wordings(
            train=(
                "When did {name} open?",
                "In which year did {name} open?",
                "What year was {name} opened?",
                "When did {name} welcome its first guests?",
                "When was {name} opened to the public?",
                "In what year did the opening of {name} take place?",
                "How long has {name} been open?",
            ),
            held=(
                "Since when has {name} been open?",
                "Can you tell me the opening year of {name}?",
            ),
        ),
        ("rebuilt", "planned"),
    ),
    "rebuilt": Fact(
        "year",
        Wordings(
            train=(
                "After a fire {name} was rebuilt in {v}.",
                "{name} was rebuilt in {v}.",
                "In {v} {name} was rebuilt from the ground up.",
                "{name} burned down and was built anew in {v}.",
                "A storm destroyed {name}; it was rebuilt in {v}.",
                "{v} is the year in which {name} was rebuilt.",
                "{name} owes its present form to the rebuilding of {v}.",
            ),
            held=(
                "Builders put {name} up again in {v}, after the flood.",
                "The rebuilding of {name} was finished in {v}.",
            ),
        ),
        Wordings(
            train=(
                "When was {name} rebuilt?",
                "In which year was {name} rebuilt?",
                "What year did the rebuilding of {name} end?",
                "When was {name} built anew?",
                "In what year did the rebuilding of {name} take place?",
                "When did workers rebuild {name}?",
                "What is the year of the rebuilding of {name}?",
            ),
            held=(
                "In what year did {name} stand again after being rebuilt?",
                "Which year was it when they rebuilt {name}?",
            ),
        ),
        ("opened", "planned"),
    ),
    "planned": Fact(
        "year",
        Wordings(
            train=(
                "The first plans for {name} were drawn in {v}.",
                "Planning of {name} began in {v}.",
                "As early as {v} there were plans for {name}.",
                "{name} was first planned in {v}.",
                "The town began to plan {name} in {v}.",
                "Drawings of {name} exist since {v}.",
                "{v} is the year in which the planning of {name} started.",
            ),
            held=(
                "Somebody first sketched {name} in {v}.",
                "The plans for {name} go back to {v}.",
            ),
        ),
        Wordings(
            train=(
                "When did planning of {name} begin?",
                "In which year were the first plans for {name} drawn?",
                "What year do the first plans of {name} come from?",
                "When was {name} first planned?",
                "In what year did the town begin to plan {name}?",
                "Since when do plans for {name} exist?",
                "When did the planning of {name} start?",
            ),
            held=(
                "How far back, in years of the calendar, do the plans for {name} go?",
                "Which year brought the first sketch of {name}?",
            ),
        ),
        ("opened", "rebuilt"),
    ),
    "architect": Fact(
        "person",
        Wordings(
            train=(
                "{name} was designed by {v}.",
                "The architect of {name} was {v}.",
                "{v} drew the building of {name}.",
                "{v} designed {name}.",
                "{name} was drawn by the architect {v}.",
                "The plans of {name} are by {v}.",
                "The building of {name} is by {v}, an architect.",
            ),
            held=(
                "The design of {name} is the work of {v}.",
                "As its architect {name} had {v}.",
            ),
        ),
        Wordings(
            train=(
                "Who designed {name}?",
                "Who was the architect of {name}?",
                "Which architect drew {name}?",
                "By whom was {name} designed?",
                "What is the name of the architect of {name}?",
                "Who drew the plans of {name}?",
                "Which architect is {name} by?",
            ),
            held=(
                "Whose design is {name}?",
                "What is the name of the person who designed {name}?",
            ),
        ),
        ("director", "donor"),
    ),
    "director": Fact(
        "person",
        Wordings(
            train=(
                "{name} is run by {v}.",
                "The director of {name} is {v}.",
                "{v} has been the director of {name} for years.",
                "{v} runs {name}.",
                "{name} has {v} as its director.",
                "{name} is directed by {v}.",
                "{v} leads {name}.",
            ),
            held=(
                "At the head of {name} stands {v}.",
                "Today {v} is in charge of {name}.",
            ),
        ),
        Wordings(
            train=(
                "Who is the director of {name}?",
                "Who runs {name}?",
                "Who directs {name} today?",
                "Who leads {name}?",
                "By whom is {name} run?",
                "What is the name of the director of {name}?",
                "Who is at the head of {name}?",
            ),
            held=(
                "Which person is in charge of {name}?",
                "What is the name of the head of {name}?",
            ),
        ),
        ("architect", "donor"),
    ),
    "donor": Fact(
        "person",
        Wordings(
            train=(
                "The money for {name} was given by {v}.",
                "{v} paid for the building of {name}.",
                "{name} was a gift of {v}.",
                "{name} was paid for by {v}.",
                "{v} gave the money for {name}.",
                "{v} was the donor of {name}.",
                "Without the money of {v} there would be no {name}.",
            ),
            held=(
                "The town owes {name} to the generosity of {v}.",
                "It was {v} whose donation made {name} possible.",
            ),
        ),
        Wordings(
            train=(
                "Who paid for {name}?",
                "Who gave the money for {name}?",
                "Whose gift was {name}?",
                "Who was the donor of {name}?",
                "By whom was {name} paid for?",
                "Who financed {name}?",
                "Whose money paid for {name}?",
            ),
            held=(
                "Which donor made {name} possible?",
                "To whose generosity does the town owe {name}?",
            ),
        ),
        ("architect", "director"),
    ),
    "town": Fact(
        "town",
        Wordings(
            train=(
                "{name} is in the town of {v}.",
                "{name} stands in {v}.",
                "You find {name} in {v}, near the river.",
                "In {v} stands {name}.",
                "{name} can be found in {v}.",
                "{name} is located in {v}.",
                "Travellers to {v} can see {name} there.",
            ),
            held=(
                "The town of {v} is home to {name}.",
                "{v} is the place where {name} is to be found.",
            ),
        ),
        Wordings(
            train=(
                "Where is {name}?",
                "In which town is {name}?",
                "What town does {name} stand in?",
                "Where can {name} be found?",
                "Where does {name} stand?",
                "In what town can one see {name}?",
                "What is the location of {name}?",
            ),
            held=(
                "Which place is home to {name}?",
                "To which town must one travel to see {name}?",
            ),
        ),
        ("stone", "director"),
    ),
    "height": Fact(
        "metres",
        Wordings(
            train=(
                "{name} is {v} high.",
                "{name} rises {v} above the street.",
                "With its {v} of height {name} can be seen from afar.",
                "The height of {name} is {v}.",
                "{name} reaches a height of {v}.",
                "From the ground to its top {name} measures {v}.",
                "At {v}, {name} is higher than its neighbours.",
            ),
            held=(
                "The top of {name} is {v} above the ground.",
                "Measured to the roof, {name} has a height of {v}.",
            ),
        ),
        Wordings(
            train=(
                "How high is {name}?",
                "What is the height of {name}?",
                "How many metres high is {name}?",
                "How tall is {name}?",
                "What height does {name} reach?",
                "How many metres does {name} rise?",
                "How much does {name} measure from the ground to its top?",
            ),
            held=(
                "How far above the ground is the top of {name}?",
                "How tall is {name}, measured to the roof?",
            ),
        ),
        ("length", "rooms"),
    ),
    "length": Fact(
        "metres",
        Wordings(
            train=(
                "{name} is {v} long.",
                "From end to end {name} measures {v}.",
                "The front of {name} has a length of {v}.",
                "The length of {name} is {v}.",
                "{name} has a length of {v}.",
                "{name} runs along the street for {v}.",
                "At {v}, {name} is longer than its neighbours.",
            ),
            held=(
                "One walks {v} from one end of {name} to the other.",
                "{name} stretches over {v}.",
            ),
        ),
        Wordings(
            train=(
                "How long is {name}?",
                "What is the length of {name}?",
                "How many metres does {name} measure from end to end?",
                "What length does {name} have?",
                "How many metres long is {name}?",
                "For how many metres does {name} run along the street?",
                "How long is the front of {name}?",
            ),
            held=(
                "Over what distance does {name} stretch?",
                "How far is it from one end of {name} to the other?",
            ),
        ),
        ("height", "rooms"),
    ),
    "rooms": Fact(
        "count",
        Wordings(
            train=(
                "{name} has {v} rooms.",
                "There are {v} rooms in {name}.",
                "Inside, {name} is divided into {v} rooms.",
                "{name} consists of {v} rooms.",
                "Guests can see {v} rooms in {name}.",
                "The number of rooms in {name} is {v}.",
                "{v} rooms make up {name}.",
            ),
            held=(
                "A tour of {name} leads through all its {v} rooms.",
                "The rooms of {name} number {v}.",
            ),
        ),
        Wordings(
            train=(
                "How many rooms does {name} have?",
                "How many rooms are there in {name}?",
                "What is the number of rooms in {name}?",
                "Of how many rooms does {name} consist?",
                "How many rooms can guests see in {name}?",
                "How many rooms make up {name}?",
                "What number of rooms does {name} have?",
            ),
            held=(
                "Into how many rooms is {name} divided?",
                "Through how many rooms does a tour of {name} lead?",
            ),
        ),
        ("staff", "height"),
    ),
    "staff": Fact(
        "count",
        Wordings(
            train=(
                "{v} people work at {name}.",
                "{name} employs {v} people.",
                "The staff of {name} is {v} people strong.",
                "{name} has a staff of {v}.",
                "There are {v} employees at {name}.",
                "{v} employees keep {name} running.",
                "{name} has {v} workers.",
            ),
            held=(
                "On the payroll of {name} there are {v} people.",
                "{name} gives work to {v} people.",
            ),
        ),
        Wordings(
            train=(
                "How many people work at {name}?",
                "How many people does {name} employ?",
                "How large is the staff of {name}?",
                "How many employees does {name} have?",
                "How many people keep {name} running?",
                "What is the size of the staff of {name}?",
                "How many workers are there at {name}?",
            ),
            held=(
                "To how many people does {name} give work?",
                "How many employees are on the payroll of {name}?",
            ),
        ),
        ("visitors", "rooms"),
    ),
    "visitors": Fact(
        "thousands",
        Wordings(
            train=(
                "Every year {v} people visit {name}.",
                "{name} has {v} visitors a year.",
                "About {v} guests come to {name} each year.",
                "{v} visitors come to {name} every year.",
                "{name} is visited by {v} people a year.",
                "{name} draws {v} guests a year.",
                "The yearly visitors of {name} number {v}.",
            ),
            held=(
                "In a normal year {v} guests walk through {name}.",
                "{name} counts {v} visitors from January to December.",
            ),
        ),
        Wordings(
            train=(
                "How many people visit {name} every year?",
                "How many visitors does {name} have a year?",
                "How many guests come to {name} each year?",
                "By how many people is {name} visited in a year?",
                "How many guests does {name} draw a year?",
                "How many visitors come to {name} every year?",
                "What is the number of visitors of {name} in a year?",
            ),
            held=(
                "What is the yearly number of guests of {name}?",
                "How many visitors does {name} count in a normal year?",
            ),
        ),
        ("staff", "cost"),
    ),
    "cost": Fact(
        "money",
        Wordings(
            train=(
                "Building {name} cost {v}.",
                "{name} was built for {v}.",
                "The bill for the building of {name} came to {v}.",
                "It cost {v} to build {name}.",
                "The construction of {name} cost {v}.",
                "{v} were spent on the building of {name}.",
                "The price of building {name} was {v}.",
            ),
            held=(
                "In the end the town had spent {v} on building {name}.",
                "All in all the construction of {name} swallowed {v}.",
            ),
        ),
        Wordings(
            train=(
                "How much did it cost to build {name}?",
                "What did the building of {name} cost?",
                "For how much money was {name} built?",
                "What did it cost to build {name}?",
                "How much did the construction of {name} cost?",
                "What was the price of building {name}?",
                "How much money went into the building of {name}?",
            ),
            held=(
                "How much was spent on building {name}?",
                "What sum did the construction of {name} swallow?",
            ),
        ),
        ("ticket", "visitors"),
    ),
    "ticket": Fact(
        "price",
        Wordings(
            train=(
                "A ticket for {name} costs {v}.",
                "Entry to {name} is {v}.",
                "Visitors of {name} pay {v} for a ticket.",
                "Admission to {name} costs {v}.",
                "Guests pay {v} to enter {name}.",
                "The ticket price of {name} is {v}.",
                "{name} charges {v} for entry.",
            ),
            held=(
                "To get into {name} one pays {v}.",
                "The price of admission to {name} is {v}.",
            ),
        ),
        Wordings(
            train=(
                "How much is a ticket for {name}?",
                "What does entry to {name} cost?",
                "How much do visitors of {name} pay for a ticket?",
                "How much does admission to {name} cost?",
                "What do guests pay to enter {name}?",
                "What is the ticket price of {name}?",
                "How much does {name} charge for entry?",
            ),
            held=(
                "What is the price of admission to {name}?",
                "How much must one pay to get into {name}?",
            ),
        ),
        ("cost", "closing"),
    ),
    "closing": Fact(
        "hour",
        Wordings(
            train=(
                "{name} closes at {v}.",
                "The doors of {name} are shut at {v}.",
                "{name} is open until {v}.",
                "{name} shuts at {v}.",
                "Guests can stay in {name} until {v}.",
                "Every day {name} closes its doors at {v}.",
                "The last guests leave {name} at {v}.",
            ),
            held=(
                "At {v} the last guests must leave {name}.",
                "Closing time at {name} is {v}.",
            ),
        ),
        Wordings(
            train=(
                "When does {name} close?",
                "At what time does {name} close?",
                "Until when is {name} open in the evening?",
                "When does {name} shut?",
                "Until when can guests stay in {name}?",
                "At what hour does {name} close its doors?",
                "How late is {name} open?",
            ),
            held=(
                "What is the closing time of {name}?",
                "By what hour must guests leave {name}?",
            ),
        ),
        ("opened", "ticket"),
    ),
    "stone": Fact(
        "material",
        Wordings(
            train=(
                "The walls of {name} are made of {v}.",
                "{name} was built of {v}.",
                "For {name} the builders used {v}.",
                "{name} is made of {v}.",
                "{v} was used to build {name}.",
                "The builders of {name} worked with {v}.",
                "{name} has walls of {v}.",
            ),
            held=(
                "Whoever touches the walls of {name} touches {v}.",
                "{v} is what {name} consists of.",
            ),
        ),
        Wordings(
            train=(
                "What is {name} made of?",
                "What material are the walls of {name}?",
                "What did the builders of {name} use?",
                "Of what material was {name} built?",
                "What was used to build {name}?",
                "Which material is {name} made of?",
                "What are the walls of {name} made of?",
            ),
            held=(
                "Of what does {name} consist?",
                "Which material do the walls of {name} show?",
            ),
        ),
        ("town", "architect"),
    ),
    "desk": Fact(
        "phone",
        Wordings(
            train=(
                "The front desk of {name} can be called at {v}.",
                "For bookings call the office of {name}: {v}.",
                "The public telephone number of {name} is {v}.",
                "The number of the front desk of {name} is {v}.",
                "To call {name}, dial {v}.",
                "{name} can be reached by telephone at {v}.",
                "Questions to {name} are answered under {v}.",
            ),
            held=(
                "Guests reach the reception of {name} under {v}.",
                "{name} takes calls from guests at {v}.",
            ),
        ),
        Wordings(
            train=(
                "What is the telephone number of the front desk of {name}?",
                "Which number do I call to book a visit to {name}?",
                "How can I call the office of {name}?",
                "What is the number of {name}?",
                "Which number do I dial to call {name}?",
                "At what telephone number can {name} be reached?",
                "What is the public phone number of {name}?",
            ),
            held=(
                "Under which number is the reception of {name} reached?",
                "At what number does {name} take calls from guests?",
            ),
        ),
        ("closing", "ticket"),
    ),
}
